"""LoRA and QLoRA: the same run under every strategy, a base that does not move, and an adapter that is really saved."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
from parity import (
    BF16_TOLERANCE,
    FP32_TOLERANCE,
    LAUNCHES,
    ROWS_PER_STEP,
    assert_parity,
    assert_really_active,
    differences,
)
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_parity import skip_what_this_machine_lacks
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ElectraConfig, MixtralConfig, T5Config

from finetune import distributed
from finetune.config import sections
from finetune.errors import InputError, RunStopped
from finetune.models import adapter, loading, quantization
from finetune.models.attention import stock_attention
from finetune.output import run_files
from finetune.training.loss import token_loss_sum
from recipes import sft

METHODS = {
    "lora": {"adapter__type": "lora"},
    "qlora": {"adapter__type": "lora", "quantization__bits": 4},
}
RANK = 8


def changes(method: str, micro_batch_size: int) -> dict[str, Any]:
    return METHODS[method] | {
        "adapter__rank": RANK,
        "train__learning_rate": 1e-3,
        "train__max_grad_norm": 0.5,
        "train__global_batch_size": ROWS_PER_STEP,
        "train__micro_batch_size": micro_batch_size,
    }


class Runs:
    """Trains under a strategy; keeps the runs on one process."""

    def __init__(self, ranks: Any, model: Path, rows: Path, folder: Path) -> None:
        self.ranks, self.model, self.rows, self.folder = ranks, model, rows, folder
        self.known: dict[Any, Any] = {}

    def __call__(
        self, strategy: str, world_size: int, precision: str, full: bool = False, **settings: Any
    ) -> tuple[Any, Any]:
        """Metrics, and the saved adapter (or the whole model)."""
        config = scenarios.configuration(self.model, self.rows, self.folder / "run", **settings)
        everyone = self.ranks(world_size).run(scenarios.train, config, strategy=strategy, mixed_precision=precision)
        for seen in everyone:
            assert_really_active(seen, strategy, world_size)
        weights = "model.safetensors" if full else adapter.WEIGHTS
        return scenarios.read_metrics(self.folder / "run"), load_file(self.folder / "run" / "final" / weights)

    def on_one_process(self, method: str, precision: str) -> tuple[Any, Any]:
        if (method, precision) not in self.known:
            self.known[method, precision] = self("single", 1, precision, **changes(method, ROWS_PER_STEP))
        return self.known[method, precision]


@pytest.fixture(scope="module")
def runs(ranks: Any, weights_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, weights_folder, conversations, tmp_path_factory.mktemp("adapters"))


IN_FP32 = [(*launch, method) for launch in LAUNCHES for method in METHODS]
IN_BF16 = [(*launch, method) for launch in LAUNCHES if launch[1] == 2 or launch[0] == "hsdp" for method in METHODS]


@pytest.mark.parametrize("point", IN_FP32, ids=scenarios.point_id)
def test_losses_gradient_norms_and_adapter_are_those_of_one_process(point: Any, runs: Runs):
    strategy, world_size, method = point
    skip_what_this_machine_lacks(strategy)
    expected, expected_adapter = runs.on_one_process(method, "no")
    metrics, saved = runs(strategy, world_size, "no", **changes(method, ROWS_PER_STEP // 4))  # two processes accumulate
    assert len(metrics) == scenarios.STEPS
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.1
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert saved.keys() == expected_adapter.keys()
    for name, weight in expected_adapter.items():
        assert (saved[name] - weight).abs().mean() < 1e-6, name


@pytest.mark.parametrize(("strategy", "world_size", "method"), IN_BF16)
def test_bf16_losses_stay_within_the_stated_tolerance(strategy: str, world_size: int, method: str, runs: Runs):
    skip_what_this_machine_lacks(strategy)
    expected, _ = runs.on_one_process(method, "bf16")
    metrics, _ = runs(strategy, world_size, "bf16", **changes(method, ROWS_PER_STEP // (world_size * 2)))
    assert_parity(metrics, expected, BF16_TOLERANCE)
    exact, _ = runs.on_one_process(method, "no")
    assert differences(metrics, exact)["loss"] > FP32_TOLERANCE["loss"]  # it was computed in bf16


@pytest.mark.parametrize(("strategy", "method"), list(itertools.product(("ddp", "fsdp2", "zero2", "zero3"), METHODS)))
def test_modules_trained_whole_and_recomputed_activations_change_nothing(strategy: str, method: str, runs: Runs):
    settings = changes(method, 4) | {"adapter__modules_to_save": ["embed_tokens"], "train__steps": 6}
    key = ("modules", method)
    if key not in runs.known:
        runs.known[key] = runs("single", 1, "no", **settings)
    expected, expected_adapter = runs.known[key]
    metrics, saved = runs(strategy, 2, "no", **settings | {"train__activation_checkpointing": "full"})
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert saved.keys() == expected_adapter.keys()
    whole = [name for name in saved if "lora_" not in name]
    assert sorted(whole) == ["base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight"]
    assert torch.equal(saved[whole[0]], saved[whole[1]])  # one weight, under each of its names, as PEFT wants it


HEADS = {
    "whole": {"adapter__modules_to_save": ["lm_head"]},
    "adapted": {"adapter__targets": ["q_proj", "lm_head"]},
}


@pytest.mark.parametrize(
    ("head", "strategy"), list(itertools.product(("whole", "adapted"), ("ddp", "fsdp2", "zero2", "zero3")))
)
def test_a_head_that_learns_beside_an_adapter_learns_the_same_on_two_processes(head: str, strategy: str, runs: Runs):
    settings = changes("lora", 4) | HEADS[head] | {"train__steps": 6}
    key = ("heads", head)
    if key not in runs.known:
        runs.known[key] = runs("single", 1, "no", **settings)
    expected, expected_adapter = runs.known[key]
    metrics, saved = runs(strategy, 2, "no", **settings)
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert any("lm_head" in name for name in saved)
    assert saved.keys() == expected_adapter.keys()
    for name, tensor in expected_adapter.items():
        torch.testing.assert_close(saved[name], tensor, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero3"])
def test_dropout_is_reproducible_per_seed(strategy: str, runs: Runs):
    settings = changes("lora", 4) | {"adapter__dropout": 0.2, "train__steps": 4}
    first, second, other, without = (
        runs(strategy, 1 if strategy == "single" else 2, "no", **settings | extra)
        for extra in ({}, {}, {"train__seed": 1}, {"adapter__dropout": 0.0})
    )
    losses = [[m["loss"] for m in metrics] for metrics, _ in (first, second, other, without)]
    assert losses[0] == losses[1]
    assert all(torch.equal(first[1][name], second[1][name]) for name in first[1])
    assert losses[0] != losses[2]
    assert losses[0] != losses[3]


def base_bytes(model: torch.nn.Module) -> dict[str, bytes]:
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {name: p.detach().contiguous().view(torch.uint8).numpy().tobytes() for name, p in frozen.items()}


@pytest.mark.parametrize("bits", ["none", 8, 4])
def test_base_weights_are_bit_identical_before_and_after_training_and_evaluation(
    bits: Any,
    weights_folder: Path,
    conversations: Path,
    held_out: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    kept: list[Any] = []
    prepare = distributed.prepare

    def watched(accelerator: Any, strategy: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        kept.extend([model, base_bytes(model)])
        return prepare(accelerator, strategy, model, *args, **kwargs)

    monkeypatch.setattr(distributed, "prepare", watched)
    settings = {"data__eval": str(held_out), "eval__every": 1, "eval__prompts": 1, "train__steps": 3}
    settings |= {"adapter__type": "lora", "quantization__bits": bits}
    sft.main(scenarios.configuration(weights_folder, conversations, tmp_path / "run", **settings))
    model, before = kept
    after = base_bytes(model)
    assert len(before) == len(after) > 15
    assert all(before[name] == after[name] for name in before)


# -- what is trained -------------------------------------------------------------------------------------------------


def attached(folder: Path, **settings: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder)
    section = sections.Adapter.model_validate({"type": "lora", "rank": RANK} | settings)
    adapter.attach(model, section, base=str(folder), revision=None, dtype=torch.float32, seed=0)
    return model


H, F, KV, V, LAYERS = 128, 256, 64, 512, 2
SIZES = {
    "q_proj": (H, H),
    "k_proj": (H, KV),
    "v_proj": (H, KV),
    "o_proj": (H, H),
    "gate_proj": (H, F),
    "up_proj": (H, F),
    "down_proj": (F, H),
}


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("modules_to_save", [[], ["embed_tokens"]], ids=str)
@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"], ["down_proj"]], ids=str)
def test_number_of_trained_weights_is_the_closed_form(
    targets: Any, modules_to_save: list[str], kind: str, weights_folder: Path
):
    model = attached(weights_folder, targets=targets, modules_to_save=modules_to_save, type=kind)
    sizes = [SIZES[name] for name in (SIZES if targets == "all-linear" else targets)]
    expected = LAYERS * sum(RANK * (rows + columns) + (columns if kind == "dora" else 0) for rows, columns in sizes)
    expected += H * V * len(modules_to_save)  # once, although embedding and head are one weight
    shapes = distributed.trained_shapes(model)
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == expected


@pytest.mark.parametrize("kind", ["lora", "dora"])
@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_model_with_adapter_computes_what_peft_computes(kind: str, rank_stabilized: bool, weights_folder: Path):
    ours = attached(weights_folder, type=kind, rank_stabilized=rank_stabilized)
    config = LoraConfig(
        r=RANK, lora_alpha=32, target_modules="all-linear", use_rslora=rank_stabilized, use_dora=kind == "dora"
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(weights_folder), config)
    generator = torch.Generator().manual_seed(3)
    named = dict(theirs.base_model.model.named_parameters())
    for name, parameter in ours.named_parameters():
        if parameter.requires_grad:
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        named[name].data.copy_(parameter.data)
    tokens = torch.randint(0, V, (2, 24), generator=generator)
    assert torch.equal(ours(tokens).logits, theirs(tokens).logits)


def test_adapter_computes_in_bf16_and_keeps_no_second_copy_of_its_inputs(weights_folder: Path):
    """PEFT's default, fp32 adapters that cast their input, saves every layer's input a second time in fp32."""

    def saved_bytes(model: Any) -> dict[torch.dtype, int]:
        storages: dict[tuple[int, torch.dtype], int] = {}
        own = {p.untyped_storage().data_ptr() for p in model.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                storages[tensor.untyped_storage().data_ptr(), tensor.dtype] = tensor.untyped_storage().nbytes()
            return tensor

        tokens = torch.zeros(2, 64, dtype=torch.long)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), torch.autocast("cpu", torch.bfloat16):
            model.model(tokens).last_hidden_state.sum()
        return {d: sum(n for (_, dtype), n in storages.items() if dtype == d) for d in (torch.float32, torch.bfloat16)}

    ours = attached(weights_folder)
    default = get_peft_model(
        AutoModelForCausalLM.from_pretrained(weights_folder, dtype=torch.bfloat16),
        LoraConfig(r=RANK, target_modules="all-linear"),
    ).base_model.model
    for parameter in ours.parameters():
        parameter.data = parameter.data.to(torch.float32 if parameter.requires_grad else torch.bfloat16)
    assert {p.dtype for p in default.parameters() if p.requires_grad} == {torch.float32}
    mine, theirs = saved_bytes(ours), saved_bytes(default)
    assert sum(mine.values()) < 0.85 * sum(theirs.values())


# -- what is saved ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["none", 8, 4])
def finished(
    request: Any, weights_folder: Path, conversations: Path, held_out: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any, Any]:
    """A run on one process, its precision of the base, and the logits of the live model on held-out rows."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    live: dict[str, Any] = {}
    save = run_files.save_final

    def watched(folder: Path, model: Any, tokenizer: Any, *args: Any, **kwargs: Any) -> None:
        model.eval()
        with torch.no_grad(), stock_attention(model):
            live["logits"] = [model(input_ids=t).logits for t in held_out_tokens(tokenizer, held_out)]
        save(folder, model, tokenizer, *args, **kwargs)

    settings = {"adapter__type": "lora", "quantization__bits": request.param, "data__eval": str(held_out)}
    settings |= {"train__learning_rate": 5e-3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        patch.setattr(run_files, "save_final", watched)
        sft.main(scenarios.configuration(weights_folder, conversations, folder, **settings))
    return folder, request.param, live["logits"]


def held_out_tokens(tokenizer: Any, held_out: Path) -> list[torch.Tensor]:
    return [tiny.tensors(row)[1] for row in tiny.read_rows(held_out, tokenizer)]


def load_base(folder: Path, bits: Any) -> Any:
    config = None if bits == "none" else quantization.bitsandbytes_config(bits, torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, quantization_config=config)
    if bits != "none":
        quantization.settle(model, torch.float32)  # some CPUs have a kernel for evaluation that rounds to bf16
    return model


def test_peft_loads_the_saved_adapter_and_gives_the_live_logits_and_the_held_out_loss(
    finished: Any, weights_folder: Path, held_out: Path
):
    folder, bits, live = finished
    model = PeftModel.from_pretrained(load_base(weights_folder, bits), folder / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / "final")
    rows = tiny.read_rows(held_out, tokenizer)
    total = 0.0
    with torch.no_grad():
        for row, expected in zip(rows, live):
            next_tokens, input_ids = tiny.tensors(row)
            logits = model(input_ids=input_ids).logits
            assert (logits - expected).abs().max() < 1e-5
            total += token_loss_sum(logits, next_tokens).item()
    metrics = scenarios.read_metrics(folder)
    # LLM.int8 rounds its inputs, so that a difference in the last bit of one can move a logit by more
    assert total / sum(rows.trained_tokens) == pytest.approx(metrics[-1]["eval_loss"], rel=1e-3 if bits == 8 else 1e-5)
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.1


def test_final_holds_the_adapter_alone_with_tokenizer_and_card(finished: Any):
    folder, _, _ = finished
    names = {path.name for path in (folder / "final").iterdir()}
    assert names == {
        "run.yaml",
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
        "chat_template.jinja",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    saved = load_file(folder / "final" / adapter.WEIGHTS)
    assert len(saved) == 2 * 7 * LAYERS
    assert all(value.numel() and value.abs().max() > 0 for value in saved.values())
    assert "library_name: peft" in (folder / "final" / "README.md").read_text()


@pytest.mark.parametrize("bits", ["none", 4])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("modules", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]], ids=str)
def test_peft_loads_adapters_with_modules_trained_whole_and_gives_the_live_logits(
    modules: list[str], tied: bool, bits: Any, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tiny.write_weights(tiny.build_model_folder(tmp_path / "model", tied=tied))
    live: dict[str, Any] = {}
    tokens = torch.randint(0, V, (2, 24), generator=torch.Generator().manual_seed(0))
    save = run_files.save_final

    def watched(folder: Path, model: Any, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad(), stock_attention(model):
            live["logits"] = model.eval()(input_ids=tokens).logits
        save(folder, model, *args, **kwargs)

    monkeypatch.setattr(run_files, "save_final", watched)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    settings = {"adapter__type": "lora", "adapter__modules_to_save": modules, "quantization__bits": bits}
    sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", train__steps=3, **settings))
    model = PeftModel.from_pretrained(load_base(folder, bits), tmp_path / "run" / "final").eval()
    with torch.no_grad():
        assert (model(tokens).logits - live["logits"]).abs().max() < 1e-5


BUGS = {
    "empty tensors": lambda state: {name: value.new_empty(0) for name, value in state.items()},
    "a tensor is missing": lambda state: dict(list(state.items())[1:]),
    "untrained values": lambda state: {name: torch.zeros_like(value) for name, value in state.items()},
    "a shard instead of the whole": lambda state: {n: v[: len(v) // 2].clone() for n, v in state.items()},
    "a tensor too many": lambda state: state | {"base_model.model.lm_head.weight": torch.zeros(2)},
}


@pytest.fixture(scope="module")
def earlier_run(weights_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("earlier") / "run"
    sft.main(scenarios.configuration(weights_folder, conversations, folder, adapter__type="lora", train__steps=2))
    return folder


@pytest.mark.parametrize("bug", BUGS)
def test_adapter_that_is_not_the_trained_one_is_an_error_at_save_time(
    bug: str,
    earlier_run: Path,
    weights_folder: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    save = adapter.save

    def wrong(folder: Path, model: Any, trained: Any, **kwargs: Any) -> None:
        save(folder, model, trained, **kwargs)
        state = BUGS[bug](load_file(folder / adapter.WEIGHTS))
        save_file(state, folder / adapter.WEIGHTS, adapter.FORMAT)

    config = scenarios.configuration(
        weights_folder, conversations, tmp_path / "run", adapter__type="lora", train__steps=2
    )
    shutil.copytree(earlier_run, tmp_path / "run")
    earlier = {path.name: path.read_bytes() for path in (tmp_path / "run" / "final").iterdir()}
    monkeypatch.setattr(adapter, "save", wrong)
    with pytest.raises(RunStopped, match="The saved adapter differs from the trained one"):
        sft.main(config)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run" / "final").iterdir()} == earlier


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", ["save", "verify", "rename"])
def test_killed_while_saving_an_earlier_adapter_remains_whole(
    moment: str,
    earlier_run: Path,
    weights_folder: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    config = scenarios.configuration(
        weights_folder, conversations, tmp_path / "run", adapter__type="lora", train__steps=2
    )
    shutil.copytree(earlier_run, tmp_path / "run")
    earlier = {path.name: path.read_bytes() for path in (tmp_path / "run" / "final").iterdir()}

    def kill(*args: Any, **kwargs: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        if moment == "rename":
            patch.setattr(run_files, "replace", kill)
        else:
            patch.setattr(adapter, moment, kill)
        with pytest.raises(Killed):
            sft.main(config)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run" / "final").iterdir()} == earlier
    sft.main(config)  # and the next run clears up
    left = {".lock", "run.yaml", "metrics.jsonl", "checkpoints", "final"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == left


# -- published models ------------------------------------------------------------------------------------------------


def quantised_folder(source: Path, folder: Path, bits: int, storage: torch.dtype) -> Path:
    """A model as it is published quantised, with 4-bit weights in bytes."""
    config = quantization.bitsandbytes_config(bits, torch.float32)
    if bits == 4:
        config.bnb_4bit_quant_storage = storage
    AutoModelForCausalLM.from_pretrained(source, quantization_config=config).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("strategy", ["single", "fsdp2"])
def test_model_published_in_4_bits_is_recognised_sharded_and_gives_the_losses_of_quantising_it_here(
    strategy: str, runs: Runs, weights_folder: Path, conversations: Path, tmp_path: Path, ranks: Any
):
    expected, _ = runs.on_one_process("qlora", "no")
    published = quantised_folder(weights_folder, tmp_path / "published", 4, torch.uint8)
    assert quantization.stored_bits(AutoConfig.from_pretrained(published)) == 4
    settings = changes("qlora", 4) | {"quantization__bits": "none"}
    config = scenarios.configuration(published, conversations, tmp_path / "run", **settings)
    world_size = 1 if strategy == "single" else 2
    for seen in ranks(world_size).run(scenarios.train, config, strategy=strategy):
        assert_really_active(seen, strategy, world_size)
    assert_parity(scenarios.read_metrics(tmp_path / "run"), expected, FP32_TOLERANCE)


@pytest.mark.parametrize(
    ("stored", "asked", "sentence"),
    [
        ({"quant_method": "gptq", "bits": 4}, None, "published quantised with gptq"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 4, "published in 8 bits and cannot be loaded in 4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4, None),
        ({}, 4, None),
    ],
)
def test_published_quantisation_is_told_from_what_was_asked(stored: Any, asked: Any, sentence: Any, model_folder: Path):
    config = AutoConfig.from_pretrained(model_folder)
    if stored:
        config.quantization_config = stored
    found = quantization.problems(config, asked)
    assert (sentence in found[0]) if sentence else (found == [])


@pytest.mark.parametrize("stored_bits", [4, 8])
def test_full_fine_tuning_of_a_published_quantised_model_is_refused_before_weights_load(
    stored_bits: int, model_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "load_model", None)
    folder = shutil.copytree(model_folder, tmp_path / "published")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", f"load_in_{stored_bits}bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ValueError, match=rf"Weights quantised to {stored_bits} bits are frozen .* set adapter\.type to lora"
    ):
        sft.main(scenarios.configuration(folder, conversations, tmp_path / "run"))


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"adapter__targets": ["q_proj", "qproj"]}, r"no linear layer qproj; it has .*q_proj"),
        ({"adapter__targets": []}, r"no linear layer in an empty list"),
        ({"adapter__modules_to_save": ["embedding"]}, r"no module embedding; it has .*embed_tokens"),
        ({"adapter__type": "none", "adapter__rank": 4}, r"adapter\.rank is set, but adapter\.type is none"),
        (
            {"adapter__targets": ["q_proj"], "adapter__modules_to_save": ["mlp"], "quantization__bits": 4},
            r"mlp will be quantised and cannot be trained in full; put its linear layers into adapter\.targets",
        ),
        (
            {"adapter__targets": ["q_proj"], "adapter__modules_to_save": ["down_proj"], "quantization__bits": 8},
            r"down_proj will be quantised",
        ),
        ({"train__optimizer": "adafactor", "train__weights": "bf16"}, r"would lose the small updates of adafactor"),
        (
            {"adapter__targets": ["q_proj"], "adapter__modules_to_save": ["q_proj"]},
            r"q_proj is in both targets and modules_to_save",
        ),
    ],
)
def test_names_that_match_nothing_are_refused_before_weights_load(
    settings: Any,
    sentence: str,
    weights_folder: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(loading, "load_model", None)
    with pytest.raises(ValueError, match=sentence):
        sft.main(
            scenarios.configuration(
                weights_folder, conversations, tmp_path / "run", **{"adapter__type": "lora"} | settings
            )
        )


def test_mixture_of_experts_that_would_stay_in_16_bits_is_refused_before_weights_load(
    conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loading, "load_model", None)
    folder = tmp_path / "mixture"
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "num_local_experts": 4}
    MixtralConfig(**sizes, **heads, architectures=["MixtralForCausalLM"]).save_pretrained(folder)
    tiny.build_tokenizer().save_pretrained(folder)
    settings = {"adapter__type": "lora", "quantization__bits": 4}
    with pytest.raises(ValueError, match=r"only \d+ % of this model's matrix weights are in linear layers"):
        sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", **settings))


def test_model_that_is_no_causal_language_model_is_refused_with_a_sentence(
    model_folder: Path, conversations: Path, tmp_path: Path
):
    folder = shutil.copytree(model_folder, tmp_path / "t5")
    T5Config(d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4, vocab_size=512).save_pretrained(folder)
    with pytest.raises(InputError, match="does not make a causal language model"):
        sft.main(scenarios.configuration(folder, conversations, tmp_path / "run", adapter__type="lora"))


def test_model_that_sees_the_tokens_that_it_is_to_predict_is_refused_before_weights_load(
    model_folder: Path, conversations: Path, tmp_path: Path
):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}
    folder = shutil.copytree(model_folder, tmp_path / "encoder")
    ElectraConfig(**sizes, num_attention_heads=4, embedding_size=64).save_pretrained(folder)
    with pytest.raises(InputError, match="electra shows each token those that follow it"):
        sft.main(scenarios.configuration(folder, conversations, tmp_path / "run"))


EIGHT_BIT = list(
    itertools.product(
        ("ddp", "fsdp2", "zero2", "zero3"), ("fp32_master", "bf16"), ("adamw_8bit", "paged_adamw_8bit", "lion_8bit")
    )
)


@pytest.mark.parametrize("point", EIGHT_BIT, ids=scenarios.point_id)
def test_8_bit_state_in_bf16_follows_one_process_in_fp32(point: Any, runs: Runs):
    strategy, weights, optimizer = point
    rate = 3e-4 if optimizer == "lion_8bit" else 1e-3
    settings = {"train__optimizer": optimizer, "train__learning_rate": rate, "train__steps": 8}
    settings |= {"train__micro_batch_size": 4, "train__max_grad_norm": 0.5}
    key = ("8 bits", optimizer)
    if key not in runs.known:
        runs.known[key] = runs("single", 1, "no", full=True, **settings)
    metrics, _ = runs(strategy, 2, "bf16", full=True, **settings, train__weights=weights)
    expected, _ = runs.known[key]
    assert max(abs(one["loss"] - other["loss"]) for one, other in zip(metrics, expected)) < 3e-2
    assert metrics[-1]["loss"] < metrics[0]["loss"] - 0.3
