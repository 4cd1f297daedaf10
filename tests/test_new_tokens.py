"""Chat templates by name on a base whose tokenizer lacks their tokens: exactly the new rows are trained, everywhere."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import scenarios
import tiny
import torch
from parity import FP32_TOLERANCE, assert_parity, assert_really_active
from peft import LoraConfig, get_peft_model
from peft.tuners.trainable_tokens import TrainableTokensLayer
from safetensors.torch import load_file
from thinning import thinned
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from finetune import distributed
from finetune.cli.planning.asked import asked
from finetune.cli.planning.written import Options
from finetune.config import sections
from finetune.data import named_templates
from finetune.data.formats import Example
from finetune.data.named_templates import NAMED
from finetune.data.prompt_texts import Prompt
from finetune.errors import InputError
from finetune.export import adapted_model, adapter_source
from finetune.export.checkpoint_export import export
from finetune.export.merge import merge
from finetune.generation.manner import Manner
from finetune.generation.speaker_loading import Request, read_speakers
from finetune.models import adapter, loading, new_tokens
from finetune.models.token_rows import compute_apart
from finetune.optim.optimizer import build_optimizer
from finetune.output import run_files
from finetune.output.run_reading import read_run
from finetune.run.preflight import check
from finetune.trace.building import build
from finetune.training.loss import next_token_loss_sum, take_losses
from recipes import dpo, sft

KNOWN = 300
"""Tokens of the base."""
GROWN = 320
"""Rows of its vocabulary with two tokens more: the next multiple of 64."""
STEPS = 4
LAUNCH = distributed.Strategy.from_environment
REVISION: dict[str, Any] = {"revision": None, "trust_remote_code": False}
HOW: dict[str, Any] = REVISION | {"device": torch.device("cpu")}


def base_folder(folder: Path, *, tied: bool, padding: int = 0) -> Path:
    """A model whose tokenizer has no chat template, and none of the tokens that chatml writes.

    Args:
        padding: rows that the model has beyond its tokenizer's tokens.
    """
    tiny.build_model_folder(folder, tied=tied, hidden_size=32, intermediate_size=64)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([" ".join(tiny.WORDS) + " user assistant system\n"] * 8, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    fast.save_pretrained(folder)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    sizes = {"vocab_size": len(fast) + padding, "eos_token_id": 0, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config | sizes))
    return tiny.write_weights(folder)


@pytest.mark.parametrize("name", [name for name, each in NAMED.items() if each.specials])
def test_each_template_adds_its_tokens_once_and_for_good(name: str, runs: Any, tmp_path: Path):
    tokenizer = AutoTokenizer.from_pretrained(runs.base(tied=True))
    assert named_templates.use(tokenizer, name, adds_tokens=True) == NAMED[name].specials
    tokenizer.save_pretrained(tmp_path)
    read = AutoTokenizer.from_pretrained(tmp_path)
    assert [read(token)["input_ids"] for token in NAMED[name].specials] == [
        [KNOWN + place] for place in range(len(NAMED[name].specials))
    ]
    assert read.eos_token == NAMED[name].end
    assert read.decode(read("".join(NAMED[name].specials))["input_ids"], skip_special_tokens=True) == ""
    assert named_templates.use(read, name, adds_tokens=True) == ()


class Runs:
    """Trains a base by chatml; each run has a folder of its own, and is kept."""

    def __init__(self, ranks: Any, rows: Path, folder: Path) -> None:
        self.ranks, self.rows, self.folder = ranks, rows, folder

    def base(self, *, tied: bool, padding: int = 0) -> Path:
        folder = self.folder / f"base{tied}{padding}"
        return folder if folder.exists() else base_folder(folder, tied=tied, padding=padding)

    def config(self, base: Path, name: str, **settings: Any) -> Any:
        own: dict[str, Any] = {"data__chat_template": "chatml", "train__steps": STEPS, "adapter__type": "lora"}
        own |= settings if "adapter__type" in settings else settings | {"adapter__rank": 4}
        return scenarios.configuration(base, self.rows, self.folder / name, **own)

    def __call__(
        self, base: Path, *, strategy: str = "single", world_size: int = 1, name: str = "", **settings: Any
    ) -> Path:
        """The output folder."""
        described = "-".join([base.name, strategy, *(f"{key}={value}" for key, value in sorted(settings.items()))])
        folder = self.folder / (name or described.replace("/", "_"))
        if not (folder / "final").exists():
            config = self.config(base, folder.name, train__micro_batch_size=8 // world_size // 2, **settings)
            everyone = self.ranks(world_size).run(scenarios.train, config, strategy=strategy, mixed_precision="no")
            for seen in everyone:
                assert_really_active(seen, strategy, world_size)
        return folder


@pytest.fixture(scope="module")
def runs(ranks: Any, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(ranks, conversations, tmp_path_factory.mktemp("new-tokens"))


def result(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(next((folder / "final").glob("*model.safetensors")))


@pytest.mark.parametrize(
    ("strategy", "tied", "method"),
    thinned(
        [("fsdp2", True, "lora"), ("zero3", False, "lora")],
        [
            *(("fsdp2", False, "lora"), ("fsdp2", True, "none"), ("zero3", True, "lora"), ("zero3", False, "none")),
            *(("zero2", True, "lora"), ("ddp", False, "lora")),
        ],
    ),
)
def test_losses_and_new_rows_are_those_of_one_process(strategy: str, tied: bool, method: str, runs: Runs):
    base = runs.base(tied=tied)
    settings = {} if method == "lora" else {"adapter__type": method}
    one = runs(base, **settings)
    two = runs(base, strategy=strategy, world_size=2, **settings)
    assert_parity(scenarios.read_metrics(two), scenarios.read_metrics(one), FP32_TOLERANCE)
    expected, found = result(one), result(two)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert (found[name] - weight).abs().mean() < 1e-6, name


def mean_of(base: Path) -> torch.Tensor:
    """What the tokens of chatml begin with: the mean of the rows of all tokens that were there."""
    return load_file(base / "model.safetensors")["model.embed_tokens.weight"][:KNOWN].double().mean(0).float()


@pytest.mark.parametrize(("tied", "padding"), [(True, 0), (False, 0), (True, 5), (False, 1)])
def test_only_the_new_rows_are_trained_and_begin_as_the_mean(tied: bool, padding: int, runs: Runs, tmp_path: Path):
    base = runs.base(tied=tied, padding=padding)
    before = load_file(base / "model.safetensors")
    config = runs.config(base, "unused")
    model = run_model(config)
    rows = model.get_input_embeddings().token_adapter.trainable_tokens_delta.default
    assert torch.equal(rows, mean_of(base).expand(2, -1))
    merge(runs(base), tmp_path / "merged", dtype="fp32", say=lambda line: None)
    after = load_file(tmp_path / "merged" / "model.safetensors")
    names = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    assert after.keys() == before.keys()
    for name in names:
        assert len(after[name]) == (GROWN if padding < 2 else KNOWN + padding)
        kept = [row for row in range(KNOWN + padding) if row not in (KNOWN, KNOWN + 1)]
        assert torch.equal(after[name][kept], before[name][kept])
        assert ((after[name][KNOWN : KNOWN + 2] - before[name][:KNOWN].mean(0)).abs().amax(1) > 1e-4).all()
        of_no_token = after[name][max(KNOWN + 2, KNOWN + padding) :]
        assert torch.equal(of_no_token, before[name].double().mean(0).float().expand_as(of_no_token))
    trained = {name for name in result(runs(base)) if "trainable_tokens_delta" in name}
    prefix = "base_model.model."
    modules = ["model.embed_tokens"] + ([] if tied else ["lm_head"])
    assert trained == {f"{prefix}{module}.token_adapter.trainable_tokens_delta" for module in modules}


def run_model(config: Any) -> Any:
    """The model of a run on one process, before its first step."""
    launch = distributed.Strategy.from_environment()
    spec = check(config, launch)
    model = loading.load_model(
        spec.section.path, spec.stored_config, **HOW, attention="auto", dtype=torch.float32, seed=0, bits=None
    )
    new_tokens.give_rows(model, spec.new_tokens)
    adapter.attach(
        model, config.adapter, base="", revision=None, dtype=torch.float32, seed=0, token_rows=spec.new_tokens.rows
    )
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_losses_and_gradients_are_those_of_peft(tied: bool, runs: Runs):
    base = runs.base(tied=tied)
    ours = run_model(runs.config(base, "unused"))
    take_losses(ours)
    theirs = AutoModelForCausalLM.from_pretrained(base)
    theirs.resize_token_embeddings(GROWN, mean_resizing=False)
    for module in new_tokens.own(theirs):
        module.weight.data[KNOWN + 2 :] = module.weight.data[:KNOWN].mean(0)
    indices = {"embed_tokens": [KNOWN, KNOWN + 1]} | ({} if tied else {"lm_head": [KNOWN, KNOWN + 1]})
    config = LoraConfig(r=4, lora_alpha=32, target_modules="all-linear", trainable_token_indices=indices)
    theirs = get_peft_model(theirs, config)
    weights = {adapter.saved_name(name): p for name, p in ours.named_parameters() if p.requires_grad}
    others = {n.replace(".default", ""): p for n, p in theirs.named_parameters() if p.requires_grad}
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.add_(0.05 * torch.randn_like(parameter))
            others[name].copy_(parameter)
    assert set(weights) == set(others)
    tokens = torch.randint(KNOWN - 5, KNOWN + 2, (2, 12))
    next_tokens = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], 1)
    optimizers = [torch.optim.SGD(each.values(), lr=0.5) for each in (weights, others)]
    for _ in range(3):
        mine = next_token_loss_sum(ours, (next_tokens, {"input_ids": tokens})) / 22
        expected = theirs(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(mine, expected, rtol=0, atol=1e-5)
        for loss, optimizer in zip((mine, expected), optimizers):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    for name, parameter in weights.items():
        torch.testing.assert_close(parameter, others[name], rtol=0, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=tokens).logits, theirs(input_ids=tokens).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tied", "padding"), [(True, 0), (False, 1), (True, 5)])
def test_the_adapter_loads_by_the_lines_of_its_card_and_computes_as_the_merged_model(
    tied: bool, padding: int, runs: Runs, tmp_path: Path
):
    folder = runs(runs.base(tied=tied, padding=padding))
    card = (folder / "final" / "README.md").read_text()
    (lines,) = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert ("resize_token_embeddings" in lines) == (padding < 2)
    rows = GROWN if padding < 2 else KNOWN + padding
    told = {"tokens": ["<|im_start|>", "<|im_end|>"], "trained_rows": [KNOWN, KNOWN + 1], "rows": rows}
    assert read_run(folder)["new_tokens"] == told | {"rows_of_base": KNOWN + padding}
    found: dict[str, Any] = {}
    exec(lines.replace("DIR", str(folder / "final")), found)
    merge(folder, tmp_path / "merged", dtype="fp32", say=lambda line: None)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == tied
    tokens = torch.randint(0, KNOWN + 2, (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours, theirs = merged(input_ids=tokens).logits, found["model"](input_ids=tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_lines_of_the_card_load_the_revision_that_the_run_pinned(runs: Runs):
    folder = runs(runs.base(tied=True))
    run, metrics = read_run(folder), scenarios.read_metrics(folder)[-1]
    assert "revision=" not in run_files.model_card("owner/base", run, metrics)
    run["config"]["model"] |= {"path": "owner/base", "revision": "abc"}
    card = run_files.model_card("owner/base", run, metrics)
    assert "model = AutoModelForCausalLM.from_pretrained('owner/base', revision='abc')\n" in card


@pytest.mark.parametrize(("tied", "method"), [(True, "lora"), (False, "lora"), (True, "none")])
def test_a_run_is_resumed_and_its_checkpoint_exported_as_its_result(
    tied: bool, method: str, runs: Runs, tmp_path: Path
):
    base = runs.base(tied=tied)
    settings = {} if method == "lora" else {"adapter__type": method}
    whole = runs(base, checkpoint__every=2, checkpoint__keep=2, **settings)
    checkpoints = whole / "checkpoints"
    first, last = (checkpoints / f"step-{step:08}" for step in (2, 4))
    export(last, tmp_path / "exported")
    exported = load_file(next((tmp_path / "exported").glob("*model.safetensors")))
    assert exported.keys() == result(whole).keys()
    assert all(torch.equal(exported[name], value) for name, value in result(whole).items())
    tokenizers = [AutoTokenizer.from_pretrained(each) for each in (tmp_path / "exported", whole / "final")]
    assert tokenizers[0].get_vocab() == tokenizers[1].get_vocab()
    strategy = "zero3" if tied else "fsdp2"
    resumed = runs(
        base, strategy=strategy, world_size=2, name=f"resumed-{whole.name}", checkpoint__resume=str(first), **settings
    )
    rest = scenarios.read_metrics(whole)[2:]
    assert_parity(scenarios.read_metrics(resumed)[-2:], rest, FP32_TOLERANCE)


@pytest.mark.parametrize("method", ["whole", "none"])
def test_a_vocabulary_that_grew_to_any_number_of_rows_keeps_it(
    method: str, runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    how: dict[str, Any] = {"adapter__type": "none"}
    if method == "whole":
        how = {"adapter__type": "lora", "adapter__modules_to_save": ["embed_tokens", "lm_head"]}
    how |= {"checkpoint__every": 2, "checkpoint__keep": 2}
    config = runs.config(runs.base(tied=False), f"earlier-{method}", **how)
    with monkeypatch.context() as earlier:
        earlier.setattr(new_tokens, "MULTIPLE", 1)
        sft.main(config)
    folder = Path(config.train.output_dir)
    first = folder / "checkpoints" / "step-00000002"
    expected = result(folder)
    sizes = {len(value) for name, value in expected.items() if "embed" in name or "lm_head" in name}
    assert sizes == {KNOWN + 2}
    export(folder / "checkpoints" / "step-00000004", tmp_path / "exported")
    exported = load_file(next((tmp_path / "exported").glob("*model.safetensors")))
    assert all(torch.equal(exported[name], value) for name, value in expected.items())
    if method == "whole":
        merge(folder, tmp_path / "merged", dtype="fp32", say=lambda line: None)
        assert loading.load_config(str(tmp_path / "merged"), **REVISION).vocab_size == KNOWN + 2
    changed = {"checkpoint__resume": str(first), "train__output_dir": str(tmp_path / "resumed")}
    sft.main(runs.config(runs.base(tied=False), "unused", **how | changed))
    resumed = result(tmp_path / "resumed")
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())


@pytest.mark.parametrize("method", ["lora", "none"])
def test_what_was_trained_answers_and_stops_at_the_end_of_a_turn(method: str, runs: Runs):
    base = runs.base(tied=True)
    folder = runs(base, **({} if method == "lora" else {"adapter__type": method}))
    before, after = read_speakers(Request(str(folder), compares=True)).load()
    end = after.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end == KNOWN + 1
    assert end in after.end_tokens
    assert end in before.end_tokens
    prompt = after.prompt_tokens([Prompt("here", Example([{"role": "user", "content": "the red house"}]), {})])
    with torch.no_grad():
        if method == "lora":
            weight = after.model.get_output_embeddings().token_adapter.trainable_tokens_delta.default
        else:
            weight = after.model.lm_head.weight[KNOWN:]
        hidden = after.model.model(input_ids=torch.tensor(prompt)).last_hidden_state[0, -1]
        weight[1] = 100 * hidden
    (answer,) = after.answers(prompt, Manner(max_new_tokens=5))
    assert (answer.text, answer.tokens, answer.is_cut) == ("", 1, False)


@pytest.mark.parametrize("tied", [True, False])
def test_answers_are_computed_without_a_copy_of_the_matrix(tied: bool, runs: Runs, monkeypatch: pytest.MonkeyPatch):
    source = adapter_source.read(runs(runs.base(tied=tied)), base_model=None, bits=None)
    tokens = torch.randint(KNOWN - 5, KNOWN + 2, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = adapted_model.load_as_trained(source)(input_ids=tokens).logits
        model = adapted_model.load_to_answer(source, torch.float32)
        monkeypatch.delattr(TrainableTokensLayer, "get_merged_weights")  # which copies it
        torch.testing.assert_close(model(input_ids=tokens).logits, expected, rtol=0, atol=1e-6)


def test_rows_that_do_not_follow_one_another_are_computed_as_peft_does(runs: Runs):
    model = AutoModelForCausalLM.from_pretrained(runs.base(tied=False))
    indices = {"embed_tokens": [3, 7], "lm_head": [3, 7]}
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], trainable_token_indices=indices))
    for name, parameter in model.named_parameters():
        if "trainable_tokens_delta" in name:
            torch.nn.init.normal_(parameter)
    tokens = torch.arange(10)[None]
    expected = model(input_ids=tokens).logits
    compute_apart(model)
    assert torch.equal(model(input_ids=tokens).logits, expected)


def test_an_adapter_with_new_tokens_goes_on_where_the_same_template_is_set(runs: Runs):
    base = runs.base(tied=True)
    first = runs(base)
    settings = {"adapter__from": str(first)}
    second = runs(base, name="continued", adapter__type="lora", **settings)
    begun = [scenarios.read_metrics(each)[0]["loss"] for each in (first, second)]
    assert begun[1] < begun[0] - 0.005
    for template, said in (("zephyr", "no token of its vocabulary"), ("gemma", "the tokens <start_of_turn>, <end_of")):
        matched = rf"own for the tokens <\|im_start\|>, <\|im_end\|>, and this run trains {said}.*; set data\.chat_t"
        with pytest.raises(InputError, match=matched):
            check(runs.config(base, "other", data__chat_template=template, adapter__type="lora", **settings), LAUNCH())


def test_what_cannot_be_done_is_refused_with_what_to_do(runs: Runs):
    base = runs.base(tied=False)
    with pytest.raises(InputError, match=r"adapter\.targets: lm_head cannot have an .*modules_to_save instead"):
        check(runs.config(base, "refused", adapter__targets=["q_proj", "lm_head"]), LAUNCH())
    model = loading.without_weights(check(runs.config(base, "refused"), LAUNCH()).config, False)
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(KNOWN + 2, device="meta"))
    new = new_tokens.NewTokens(("<|im_start|>",), KNOWN, KNOWN, KNOWN)
    (problem,) = new_tokens.problems(model, new, sections.Adapter(type="lora"))
    assert "has a bias, which PEFT does not train for single tokens; set adapter.type to none" in problem
    assert new_tokens.problems(model, new, sections.Adapter(type="none")) == []
    with pytest.raises(InputError, match="chatml needs the special tokens"):
        read_speakers(Request(str(base), chat_template="chatml")).load()


def test_the_plan_counts_the_rows(runs: Runs, arithmetic_steps: None):
    base = runs.base(tied=False)
    flags = ["--data.chat_template", "chatml"]
    read = asked(flags, Options(model=str(base), gpus="1xH100", method="lora"))
    without = asked([], Options(model=str(base), gpus="1xH100", method="lora"))
    assert (read.question.base.token_rows, without.question.base.token_rows) == (2, 0)
    config = runs.config(base, "planned")
    ours = run_model(config)
    vocabulary = loading.config_from(json.loads((base / "config.json").read_text()) | {"vocab_size": GROWN})
    assert check(config, LAUNCH()).text_config.vocab_size == GROWN
    assert read.question.model.anatomy.parameters == loading.without_weights(vocabulary, False).num_parameters()
    setting = replace(read.question.base, adapter="lora", rank=4)
    planned = build(vocabulary, setting, torch.float32, real=True)
    trained = [{n: p.shape for n, p in each.named_parameters() if p.requires_grad} for each in (ours, planned)]
    assert trained[0] == trained[1]
    assert sum("trainable_tokens" in name for name in trained[0]) == 2


def test_new_rows_decay_as_embeddings_do(runs: Runs):
    model = run_model(runs.config(runs.base(tied=True), "unused"))
    how: dict[str, Any] = {"learning_rate": 1.0, "weights": "fp32_master", "fused": False, "rounding_seed": 0}
    for decays in (True, False):
        groups = build_optimizer(model, name="adamw", weight_decay=0.1, decay_embeddings=decays, **how).param_groups
        rows = model.get_input_embeddings().token_adapter.trainable_tokens_delta.default
        (of_rows,) = [group for group in groups if any(each is rows for each in group["params"])]
        assert of_rows["weight_decay"] == (0.1 if decays else 0.0)


def losses_of_pairs(base: Path, folder: Path, reference: str) -> list[float]:
    """Of three steps."""
    turn, pairs = [{"role": "user", "content": "the red house"}], folder / "pairs.jsonl"
    rows = [
        {"prompt": turn} | {key: [{"role": "assistant", "content": said}] for key, said in answers.items()}
        for answers in (
            {"chosen": f"{word} tree", "rejected": f"the {word}"} for word in ("red", "blue", "green", "one")
        )
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    values = {
        "model": {"path": str(base)},
        "data": {"train": str(pairs), "max_length": 64, "chat_template": "chatml"},
        "train": {"output_dir": str(folder / "run"), "steps": 3, "global_batch_size": 4, "overwrite": True},
        "adapter": {"type": "lora"},
        "dpo": {"reference": reference},
        "log": {"report": False},
    }
    dpo.main(dpo.Config.model_validate(values))
    return [line["loss"] for line in scenarios.read_metrics(folder / "run")]


def test_the_model_before_training_is_the_reference_of_pairs(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    off, cached = (losses_of_pairs(runs.base(tied=True), tmp_path, each) for each in ("adapter_off", "cached"))
    assert off[0] == pytest.approx(math.log(2), abs=1e-6)
    assert off == pytest.approx(cached, abs=1e-6)


def test_a_reference_with_another_vocabulary_is_not_taken_from_the_cache(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for multiple in (1, 64):
        monkeypatch.setattr(new_tokens, "MULTIPLE", multiple)
        first = losses_of_pairs(runs.base(tied=True), tmp_path, "cached")[0]
        assert first == pytest.approx(math.log(2), abs=1e-6)
