"""Rotary frequencies are chosen once, by the longest row of a run: a row's loss is the same whatever is beside it."""

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scenarios
import tiny
import torch
from full_trace import full_trace
from thinning import thinned
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from finetune.cli.commands import main
from finetune.data.packing import pack
from finetune.errors import InputError
from finetune.generation import speaker_loading
from finetune.models import frequencies
from finetune.models.packing_support import why_not_spread
from finetune.output.run_files import read_run
from finetune.trace.setting import Setting
from recipes import sft

ORIGINAL, LONGEST = 64, 256
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 3.0, 4.0],
    "original_max_position_embeddings": ORIGINAL,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,  # attention that sees positions
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {
        "max_position_embeddings": LONGEST,
        "original_max_position_embeddings": ORIGINAL,
        "rope_parameters": LONGROPE,
    },
    "llama": {"max_position_embeddings": ORIGINAL, "rope_parameters": DYNAMIC},
    "phimoe": {
        "max_position_embeddings": LONGEST,
        "original_max_position_embeddings": ORIGINAL,
        "rope_parameters": LONGROPE | {"short_mscale": 1.1, "long_mscale": 1.3},
        "num_local_experts": 2,
        "sliding_window": None,
    },
    "gemma3_text": {
        "max_position_embeddings": ORIGINAL,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": DYNAMIC,
        },
    },
}


def config_of(kind: str) -> Any:
    return AutoConfig.for_model(kind, **SIZES | MODELS[kind])


def model_of(kind: str, longest: int | None = LONGEST) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(kind), attn_implementation="eager", dtype=torch.float32).eval()
    if longest is not None:
        frequencies.fix(model, longest)
    return model


def logits_of(model: Any, lengths: Sequence[int]) -> list[torch.Tensor]:
    """Of rows that are padded to the longest and computed together."""
    rows = [torch.randint(2, 512, (length,), generator=torch.Generator().manual_seed(length)) for length in lengths]
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    with torch.no_grad():
        found = model(input_ids=padded, use_cache=False).logits
    return [each[:length] for each, length in zip(found, lengths)]


def differs(model: Any, lengths: Sequence[int] = (200, 30, 64, 100, 65)) -> float:
    """How much the logits of a row alone differ from its logits beside others."""
    together = logits_of(model, lengths)
    alone = [logits_of(model, [length])[0] for length in lengths]
    return max(float((one - other).abs().max()) for one, other in zip(together, alone))


@pytest.mark.parametrize("kind", MODELS)
def test_a_row_has_the_logits_that_it_has_alone(kind: str):
    assert differs(model_of(kind)) < 1e-4
    assert differs(model_of(kind, None)) > 1e-2  # as transformers computes them


@pytest.mark.parametrize("longest", [ORIGINAL - 1, ORIGINAL, ORIGINAL + 1, LONGEST])
@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_frequencies_are_those_of_transformers_for_the_longest_row(kind: str, longest: int):
    rotary, untouched = model_of(kind, longest).model.rotary_emb, model_of(kind, None)
    rope = ROPE_INIT_FUNCTIONS[MODELS[kind]["rope_parameters"]["rope_type"]]
    expected, scaling = rope(config_of(kind), torch.device("cpu"), seq_len=longest)
    assert torch.equal(rotary.inv_freq, expected)
    assert rotary.attention_scaling == scaling
    logits_of(untouched, [longest])
    torch.testing.assert_close(untouched.model.rotary_emb.inv_freq, expected)  # what a row of this length has there
    assert untouched.model.rotary_emb.attention_scaling == scaling


def test_rows_within_the_original_length_have_the_short_factors_and_others_the_long_ones():
    base = 10000.0 ** -(torch.arange(0, 8, 2) / 8)
    for longest, factors in ((ORIGINAL, "short_factor"), (ORIGINAL + 1, "long_factor")):
        model = model_of("phi3", longest)
        logits_of(model, [30])
        logits_of(model, [200])
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, base / torch.tensor(LONGROPE[factors]))


def test_only_the_kind_of_layer_that_depends_on_the_length_is_fixed():
    rotary, untouched = (model_of("gemma3_text", longest).model.rotary_emb for longest in (LONGEST, None))
    assert rotary.rope_type == {"sliding_attention": "default", "full_attention": frequencies.FIXED}
    assert torch.equal(rotary.sliding_attention_inv_freq, untouched.sliding_attention_inv_freq)
    expected, _ = ROPE_INIT_FUNCTIONS["dynamic"](
        config_of("gemma3_text"), torch.device("cpu"), seq_len=LONGEST, layer_type="full_attention"
    )
    assert torch.equal(rotary.full_attention_inv_freq, expected)


@pytest.mark.parametrize("kind", MODELS)
def test_lengths_that_change_them_are_known(kind: str):
    config = config_of(kind)
    assert not frequencies.differ(config, ORIGINAL, 1)
    assert frequencies.differ(config, ORIGINAL + 1, ORIGINAL)
    assert frequencies.differ(config, LONGEST, ORIGINAL + 1) == (kind in ("llama", "gemma3_text"))  # dynamic


@pytest.mark.parametrize("kind", MODELS)
def test_configuration_and_saved_weights_stay(kind: str):
    model, untouched = model_of(kind), model_of(kind, None)
    assert model.config.to_dict() == untouched.config.to_dict()
    assert model.state_dict().keys() == untouched.state_dict().keys()


def test_other_models_are_left_as_they_are():
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))
    before = model.model.rotary_emb.inv_freq.clone()
    frequencies.fix(model, LONGEST)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)
    assert model.model.rotary_emb.rope_type == "default"
    assert not frequencies.depend_on_length(model.config)
    assert not frequencies.differ(model.config, LONGEST, 1)
    assert all(frequencies.depend_on_length(config_of(kind)) for kind in MODELS)


@pytest.mark.parametrize("kind", ["phi3", "llama"])
def test_a_step_of_such_a_model_can_be_planned_and_its_rows_spread(kind: str):
    config = config_of(kind)
    assert why_not_spread(config, dtype=torch.float32, capability=None) == []
    fields = json.loads(config.to_json_string())
    assert full_trace(fields, Setting(row_tokens=ORIGINAL, precision="no")).peak.bytes > 0


@pytest.fixture(scope="module")
def phi3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written as models are published."""
    folder = tmp_path_factory.mktemp("phi3")
    tiny.build_tokenizer().save_pretrained(folder)
    config = config_of("phi3")
    config.architectures, config.dtype = ["Phi3ForCausalLM"], "float32"
    config.save_pretrained(folder)
    return tiny.write_weights(folder)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight conversations, on both sides of the original length."""
    file, rng = tmp_path_factory.mktemp("rows") / "train.jsonl", random.Random(0)
    with file.open("w") as opened:
        for words in (3, 5, 9, 14, 20, 40, 50, 60):
            said = [" ".join(rng.choices(tiny.WORDS, k=words)) for _ in range(2)]
            messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), said)]
            opened.write(json.dumps({"messages": messages}) + "\n")
    return file


@pytest.fixture(autouse=True)
def computes_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")


def run(model: Path, rows: Path, output: Path, **changes: Any) -> Any:
    known = {"data__max_length": LONGEST, "train__steps": 1}
    return scenarios.configuration(model, rows, output, **known | changes)


def first_loss(output: Path) -> float:
    return float(scenarios.read_metrics(output)[0]["loss"])


def test_the_first_loss_is_the_same_under_every_split_and_layout(phi3: Path, rows: Path, tmp_path: Path):
    lengths = tiny.read_rows(rows, tiny.build_tokenizer(), LONGEST).lengths
    assert min(lengths) < ORIGINAL / 2
    assert sum(length > ORIGINAL for length in lengths) == 3
    packs = len(pack(np.array(lengths), LONGEST))
    assert packs < len(lengths) / 2
    ways: dict[str, dict[str, Any]] = {
        **{f"{size} padded": {"train__micro_batch_size": size, "model__attention": "sdpa"} for size in (1, 8)},
        **{f"{size} end to end": {"train__micro_batch_size": size} for size in (1, 8)},
        "packed": {"data__packing": True, "train__micro_batch_size": 1, "train__global_batch_size": packs},
    }
    found = {}
    for name, changes in ways.items():
        sft.main(run(phi3, rows, tmp_path / name, **changes))
        found[name] = first_loss(tmp_path / name)
    assert list(found.values()) == pytest.approx([found["1 padded"]] * len(ways), rel=1e-6), found
    saved, base = (json.loads((each / "config.json").read_text()) for each in (tmp_path / "packed" / "final", phi3))
    assert saved["rope_parameters"] == base["rope_parameters"]
    sft.main(run(phi3, rows, tmp_path / "short", data__max_length=ORIGINAL))
    assert abs(first_loss(tmp_path / "short") - found["1 padded"]) > 1e-4


def test_without_it_the_first_loss_depends_on_the_split(
    phi3: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(frequencies, "fix", lambda model, longest: None)
    found = []
    for size in (1, 8):
        sft.main(run(phi3, rows, tmp_path / str(size), train__micro_batch_size=size))
        found.append(first_loss(tmp_path / str(size)))
    assert abs(found[0] - found[1]) > 1e-3


def test_a_run_goes_on_with_its_own_frequencies_only(phi3: Path, rows: Path, tmp_path: Path):
    """Rows that fit both lengths are the same rows."""
    short = tiny.write_conversations(tmp_path / "short.jsonl", rows=8)
    changes = {"train__steps": 2, "checkpoint__every": 1, "train__overwrite": False, "data__max_length": ORIGINAL}
    sft.main(run(phi3, short, tmp_path / "run", **changes))
    shutil.rmtree(tmp_path / "run" / "final")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    changes |= {"checkpoint__resume": "auto"}
    with pytest.raises(InputError, match=r"data\.max_length was 64 in .* rotary frequencies depend on it; set it back"):
        sft.main(run(phi3, short, tmp_path / "run", **changes | {"data__max_length": LONGEST}))
    sft.main(run(phi3, short, tmp_path / "run", **changes | {"data__max_length": ORIGINAL - 1}))


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_a_run_is_evaluated_with_its_own_frequencies(
    adapter: str, phi3: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Short held-out rows, which have the long factors too."""
    short = tiny.write_conversations(tmp_path / "short.jsonl", rows=4)
    changes = {"data__eval": str(short), "adapter__type": adapter, "train__activation_checkpointing": "none"}
    sft.main(run(phi3, rows, tmp_path / "run", **changes))
    recorded = read_run(tmp_path / "run")["eval_loss"]
    capsys.readouterr()
    assert main(["evaluate", str(tmp_path / "run"), "--compare", "--score", "loss", "--json"]) == 0
    before, after = json.loads(capsys.readouterr().out)["models"]
    assert before["scores"]["loss"]["value"] == pytest.approx(recorded["before"], abs=1e-5)
    assert after["scores"]["loss"]["value"] == pytest.approx(recorded["after"], abs=1e-5)


@pytest.mark.parametrize(("trained", "has_long"), [(ORIGINAL, True), (LONGEST, False)])
def test_prompts_beyond_what_a_run_trained_have_the_frequencies_of_their_length(
    trained: int, has_long: bool, phi3: Path, rows: Path, tmp_path: Path
):
    sft.main(run(phi3, rows, tmp_path / "run", data__max_length=trained))
    (speaker,) = speaker_loading.read_speakers(speaker_loading.Request(str(tmp_path / "run"))).load()
    found = []
    for length in (30, 200):
        logits_of(speaker.model, [length])
        found.append(speaker.model.model.rotary_emb.inv_freq.clone())
    assert (not torch.equal(*found)) == has_long


@pytest.mark.parametrize("strategy", thinned(["ddp", "zero3", "pp"], ["fsdp2", "cp"]))
def test_processes_have_the_first_loss_of_one(
    strategy: str, phi3: Path, rows: Path, tmp_path: Path, ranks: Any, monkeypatch: pytest.MonkeyPatch
):
    sft.main(run(phi3, rows, tmp_path / "single"))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")  # of ranks it is set if it is another one than here
    config = run(phi3, rows, tmp_path / strategy, train__micro_batch_size=2)
    assert [each["world_size"] for each in ranks(2).run(scenarios.train, config, strategy=strategy)] == [2, 2]
    assert first_loss(tmp_path / strategy) == pytest.approx(first_loss(tmp_path / "single"), rel=1e-6)
