"""pissa, olora and loftq: PEFT's start, an adapter of the published base, and the same run under every strategy."""

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import balancing
import preferences
import pytest
import scenarios
import tiny
import torch
from parity import FP32_TOLERANCE, assert_parity, assert_really_active
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_parity import skip_what_this_machine_lacks
from torch.distributed import distributed_c10d
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from finetune.checkpoint import resuming
from finetune.checkpoint.reader import open_checkpoint
from finetune.cli import commands
from finetune.config import sections
from finetune.config.dpo_section import Dpo
from finetune.config.refusals import adapter_init_problems
from finetune.distributed import Strategy
from finetune.errors import InputError, RunStopped
from finetune.export.checkpoint_export import export
from finetune.models import adapter, adapter_start, loading, quantization
from finetune.models.attention import stock_attention
from finetune.output import run_files
from finetune.run import model_setup, preflight
from finetune.run.pairs import pair_problems
from recipes import sft

CPU = torch.device("cpu")
RANK = 16
"""With which the matrices of the tiny model are small enough for an exact decomposition, as PEFT's."""
PATTERNS = {"rank_pattern": {"down_proj": 12}, "alpha_pattern": {"up_proj": 5.0}}


def started(model: Any, init: str, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    section = sections.Adapter.model_validate({"type": "lora", "rank": RANK, "alpha": 24, "init": init} | settings)
    adapter.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    how: dict[str, Any] = {"files": [], "device": CPU, "whole": lambda _: nullcontext(), "computes": True}
    return model, adapter_start.start(model, section, **how)


def theirs(model: Any, init: str, **settings: Any) -> Any:
    known = {"r": RANK, "lora_alpha": 24, "target_modules": "all-linear", "init_lora_weights": init}
    return get_peft_model(model, LoraConfig(**known | settings))


def base_of(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def layers_of(model: Any) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Name, scaled product and frozen weight of each layer with an adapter."""
    for name, layer in model.named_modules():
        if hasattr(layer, "lora_A"):
            product = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * layer.scaling["default"]
            yield name, product.detach(), layer.get_base_layer().weight.detach()


def small_gpt2() -> Any:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64))


# -- the start -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank_stabilized", [False, True])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_start_and_first_steps_are_pefts(init: str, rank_stabilized: bool, weights_folder: Path):
    settings = {"rank_pattern": PATTERNS["rank_pattern"]}
    ours, _ = started(base_of(weights_folder), init, rank_stabilized=rank_stabilized, **settings)
    their_model = theirs(base_of(weights_folder), init, use_rslora=rank_stabilized, **settings).base_model.model
    layers = list(layers_of(ours))
    assert len(layers) == 14
    for (_, product, frozen), (_, expected, expected_frozen) in zip(layers, layers_of(their_model), strict=True):
        assert product.abs().max() > 1e-3
        assert (product - expected).abs().max() < 1e-5
        assert (frozen - expected_frozen).abs().max() < 1e-5
    tokens = torch.randint(0, 512, (4, 24), generator=torch.Generator().manual_seed(0))
    assert (ours(tokens).logits - base_of(weights_folder)(tokens).logits).abs().max() < 1e-5
    losses = [[descend(model, tokens) for _ in range(4)] for model in (ours, their_model)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0] - 0.05


def descend(model: Any, tokens: torch.Tensor) -> float:
    """A step of SGD, to which it is all one how a product is split into two matrices, up to a rotation."""
    trained = [each for each in model.parameters() if each.requires_grad]
    loss = model(tokens, labels=tokens).loss
    for parameter, gradient in zip(trained, torch.autograd.grad(loss, trained), strict=True):
        parameter.data -= 0.3 * gradient
    return float(loss.detach())


def test_conv1d_of_gpt2_starts_as_pefts():
    ours, _ = started(small_gpt2(), "pissa")
    expected = theirs(small_gpt2(), "pissa", fan_in_fan_out=True).base_model.model
    for (_, product, frozen), (_, their_product, their_frozen) in zip(
        layers_of(ours), layers_of(expected), strict=True
    ):
        assert (product - their_product).abs().max() < 1e-6
        assert (frozen - their_frozen).abs().max() < 1e-6


def test_approximation_of_a_large_weight_misses_little_and_does_not_hang_on_threads():
    generator = torch.Generator().manual_seed(0)
    rows, columns = (torch.linalg.qr(torch.randn(n, 512, generator=generator).double())[0] for n in (512, 768))
    spectrum = 1 / torch.arange(1, 513) ** 0.25  # flat, as those of weights are
    matrix = rows * spectrum @ columns.T
    assert adapter_start._leading(matrix, RANK) is not None
    found = [product(matrix, threads) for threads in (1, 2)]
    assert 0.999 < found[0].norm() ** 2 / (spectrum[:RANK] ** 2).sum() <= 1.000001
    assert (found[0] - found[1]).norm() < 1e-11 * found[0].norm()


def product(matrix: torch.Tensor, threads: int) -> torch.Tensor:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        left, right = adapter_start._principal(matrix, RANK)
    finally:
        torch.set_num_threads(before)
    return left @ right


@pytest.mark.parametrize("rank", [3, RANK, 40])
@pytest.mark.parametrize("shape", ["product", "rows pruned", "columns padded"])
def test_approximation_of_a_weight_of_low_rank_is_the_best_one(shape: str, rank: int):
    matrix = torch.randn(512, 768, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    if shape == "product":
        matrix = matrix[:, :rank] @ matrix[:rank]
    elif shape == "rows pruned":
        matrix[torch.arange(512) % (512 // rank) > 0] = 0
    else:
        matrix[:, rank:] = 0
    u, values, v = torch.linalg.svd(matrix, full_matrices=False)
    best = u[:, :RANK] * values[:RANK] @ v[:RANK]
    assert (product(matrix, 1) - best).norm() < 1e-3 * best.norm()


def pruned(folder: Path) -> Path:
    """A model of which all linear layers have but three rows that are not zero."""
    tiny.write_weights(tiny.build_model_folder(folder, hidden_size=256, intermediate_size=512))
    weights = load_file(folder / "model.safetensors")
    for name, value in weights.items():
        value[3:] *= "_proj" not in name
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_pissa_on_a_pruned_base_is_the_base_and_has_all_of_its_weights(tmp_path: Path):
    folder = pruned(tmp_path)
    stored = load_file(folder / "model.safetensors")
    model, _ = started(base_of(folder), "pissa", rank=4)
    for name, added, frozen in layers_of(model):
        assert (added - stored[f"{name}.weight"]).abs().max() < 1e-6
        assert (frozen + added - stored[f"{name}.weight"]).abs().max() < 1e-6


def test_loftq_on_a_pruned_base_makes_up_for_all_that_is_lost(tmp_path: Path):
    folder = pruned(tmp_path)
    stored = load_file(folder / "model.safetensors")
    model, _ = started_in_4_bits(folder, rank=4)
    for name, added, _ in layers_of(model):
        lost = stored[f"{name}.weight"] - dequantised(model.get_submodule(name).get_base_layer())
        assert lost.norm() > 1e-2
        assert (lost - added).norm() < 1e-5 * lost.norm()


def test_loftq_brings_each_layer_of_a_4_bit_base_nearer_to_the_stored_weight(weights_folder: Path):
    model, before = started_in_4_bits(weights_folder)
    with safe_open(weights_folder / "model.safetensors", framework="pt") as stored:
        for name, added, frozen in layers_of(model):
            assert torch.equal(frozen.view(torch.uint8), before[name].view(torch.uint8))
            quantised = model.get_submodule(name).get_base_layer()
            lost = stored.get_tensor(f"{name}.weight") - dequantised(quantised)
            left, values, right = torch.linalg.svd(lost)
            best = left[:, :RANK] * values[:RANK] @ right[:RANK]
            assert (added - best).abs().max() < 1e-6
            assert (lost - added).norm() < 0.95 * lost.norm()


def started_in_4_bits(folder: Path, **settings: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with loftq's start, and the frozen weights before it."""
    model = base_of(folder)
    quantization.quantize(model, 4, torch.float32, CPU)
    vars(model).update(is_loaded_in_4bit=True)  # for PEFT
    section = sections.Adapter.model_validate({"type": "lora", "rank": RANK, "alpha": 24, "init": "loftq"} | settings)
    adapter.attach(model, section, base="", revision=None, dtype=torch.float32, seed=0)
    files = [folder / "model.safetensors"]
    whole: Any = lambda _: nullcontext()  # noqa: E731
    before = {name: frozen.clone() for name, _, frozen in layers_of(model)}
    assert adapter_start.start(model, section, files=files, device=CPU, whole=whole, computes=True) == {}
    return model, before


def dequantised(layer: Any) -> torch.Tensor:
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


# -- what is saved ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patterns", [{}, PATTERNS], ids=["", "patterns"])
@pytest.mark.parametrize("rank_stabilized", [False, True])
def test_saved_adapter_is_pefts_conversion(
    rank_stabilized: bool, patterns: dict[str, Any], weights_folder: Path, tmp_path: Path
):
    ours, beginning = started(base_of(weights_folder), "pissa", rank_stabilized=rank_stabilized, **patterns)
    their_model = theirs(base_of(weights_folder), "pissa", use_rslora=rank_stabilized, **patterns)
    named = dict(their_model.base_model.model.named_parameters())
    trained = {name: each for name, each in ours.named_parameters() if each.requires_grad}
    for name, parameter in trained.items():
        named[name].data.copy_(parameter.data)
    their_model.peft_config["default"].init_lora_weights = True  # else it would be taken off again when it is read
    their_model.save_pretrained(tmp_path / "first")
    for name, parameter in trained.items():
        parameter.data += 0.1 * torch.randn_like(parameter)
        named[name].data.copy_(parameter.data)
    their_model.peft_config["default"].init_lora_weights = "pissa"
    adapter.save(tmp_path / "ours", ours, trained, beginning=beginning)
    first = str(tmp_path / "first")
    if rank_stabilized and patterns:
        assert_same_product(tmp_path / "ours", ours, weights_folder)  # PEFT has no conversion of these
        return
    their_model.save_pretrained(tmp_path / "theirs", path_initial_model_for_weight_conversion=first)
    saved, expected = (load_file(tmp_path / each / adapter.WEIGHTS) for each in ("ours", "theirs"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    configs = [json.loads((tmp_path / each / "adapter_config.json").read_text()) for each in ("ours", "theirs")]
    for key in ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"):
        assert configs[0][key] == configs[1][key], key


def assert_same_product(folder: Path, trained: Any, base: Path) -> None:
    tokens = torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        read = PeftModel.from_pretrained(base_of(base), folder).eval()
        assert (read(tokens).logits - trained(tokens).logits).abs().max() < 1e-5


@pytest.fixture(scope="module")
def finished(weights_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run of six steps with a checkpoint after the third, and the logits of its live model."""
    folder, live = tmp_path_factory.mktemp("finished") / "run", list[torch.Tensor]()
    save = run_files.save_final

    def watched(folder: Path, model: Any, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad(), stock_attention(model):
            live.append(model.eval()(input_ids=tokens()).logits)
        save(folder, model, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "no")
        patch.setattr(run_files, "save_final", watched)
        sft.main(scenarios.configuration(weights_folder, conversations, folder, **SETTINGS))
    return folder, live[0]


SETTINGS = {
    "adapter__type": "lora",
    "adapter__rank": 8,
    "adapter__init": "pissa",
    "adapter__modules_to_save": ["lm_head"],
    "train__steps": 6,
    "train__learning_rate": 5e-3,
    "train__overwrite": False,
    "checkpoint__every": 3,
    "checkpoint__keep": 5,
}


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_adapters_of_experts_begin_with_no_weight_and_are_refused(init: str, conversations: Path, tmp_path: Path):
    """Their weights are one parameter of all experts of a layer."""
    model = balancing.mixture_folder(tmp_path / "mixture", "mixtral", architectures=["MixtralForCausalLM"])
    asked = {"adapter__type": "lora", "adapter__rank": 2, "adapter__init": init}
    with pytest.raises(InputError, match=r"mlp\.experts has adapters of all its experts; set adapter"):
        sft.main(scenarios.configuration(model, conversations, tmp_path / "run", **asked))
    others = asked | {"adapter__targets": ["q_proj", "o_proj"], "train__steps": 1}
    sft.main(scenarios.configuration(model, conversations, tmp_path / "run", **others))


def tokens() -> torch.Tensor:
    return torch.randint(0, 512, (2, 24), generator=torch.Generator().manual_seed(0))


def test_final_on_the_published_base_is_the_trained_model(finished: Any, weights_folder: Path):
    folder, live = finished
    base = base_of(weights_folder)
    untrained = base(tokens()).logits
    model = PeftModel.from_pretrained(base, folder / "final").eval()
    with torch.no_grad():
        assert (model(tokens()).logits - live).abs().max() < 1e-5
    assert (live - untrained).abs().max() > 0.1
    assert json.loads((folder / "final" / "adapter_config.json").read_text())["r"] == 16
    assert "twice the configured rank" in (folder / "final" / "README.md").read_text()


def test_export_of_a_checkpoint_is_what_final_has(finished: Any, tmp_path: Path):
    folder, _ = finished
    export(folder / "checkpoints" / "step-00000006", tmp_path / "exported")
    for name in (adapter.WEIGHTS, "adapter_config.json"):
        assert (tmp_path / "exported" / name).read_bytes() == (folder / "final" / name).read_bytes()


def test_export_on_another_base_is_refused(finished: Any, weights_folder: Path, tmp_path: Path, monkeypatch: Any):
    monkeypatch.setattr(loading, "identity", lambda *_, **__: "another")
    with pytest.raises(InputError, match="not those that"):
        export(finished[0], tmp_path / "exported")


def test_resumed_run_is_the_uninterrupted_one(
    finished: Any, weights_folder: Path, conversations: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder, _ = finished
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    resume = {"checkpoint__resume": str(folder / "checkpoints" / "step-00000003")}
    sft.main(scenarios.configuration(weights_folder, conversations, tmp_path / "run", **SETTINGS | resume))
    losses = [[line["loss"] for line in scenarios.read_metrics(run)[-3:]] for run in (folder, tmp_path / "run")]
    assert losses[0] == losses[1]
    assert (tmp_path / "run/final" / adapter.WEIGHTS).read_bytes() == (folder / "final" / adapter.WEIGHTS).read_bytes()
    settings = SETTINGS | resume | {"adapter__init": "default"}
    with pytest.raises(InputError, match=r"adapter\.init was 'pissa'"):
        sft.main(scenarios.configuration(weights_folder, conversations, tmp_path / "other", **settings))


def test_checkpoint_of_an_earlier_version_began_by_default(finished: Any):
    checkpoint = open_checkpoint(finished[0] / "checkpoints" / "step-00000003")
    config = checkpoint.contents["run"]["config"]
    known: dict[str, Any] = {"precision": "no", "weights_only": False}
    now = {name: dict(section) for name, section in config.items()}
    del config["adapter"]["init"]
    (problem,) = resuming.config_problems(checkpoint, now, **known)
    assert "adapter.init was 'default'" in problem
    now["adapter"]["init"] = "default"
    assert resuming.config_problems(checkpoint, now, **known) == []


@pytest.mark.parametrize("bug", ["nothing is taken off", "it is added"])
def test_adapter_saved_without_its_beginning_is_an_error(bug: str, weights_folder: Path, tmp_path: Path):
    model, beginning = started(base_of(weights_folder), "olora")
    trained = {name: each.detach() for name, each in model.named_parameters() if each.requires_grad}
    shapes = {name: tuple(each.shape) for name, each in trained.items()}
    written = {} if bug == "nothing is taken off" else {n: v if ".lora_A." in n else -v for n, v in beginning.items()}
    for name, taken in (("right", beginning), ("wrong", written)):
        adapter.save(tmp_path / name, model, trained, beginning=taken)
    adapter.verify(tmp_path / "right", model, shapes, trained.items(), beginning=beginning)
    with pytest.raises(RunStopped, match="differs from the trained one"):
        adapter.verify(tmp_path / "wrong", model, shapes, trained.items(), beginning=beginning)


def test_preferences_compare_with_the_model_that_training_begins_with(
    weights_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    pairs = preferences.write_pairs(tmp_path / "pairs.jsonl", rows=8)
    settings = {"adapter__type": "lora", "adapter__init": "pissa", "train__steps": 2}
    cfg = scenarios.configuration(weights_folder, pairs, tmp_path / "run", **settings)
    preferences.tune(cfg, {})
    assert scenarios.read_metrics(tmp_path / "run")[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    (problem,) = pair_problems(cfg, Dpo(reference="adapter_off"), Strategy.from_environment())
    assert "set it to cached" in problem


# -- strategies ------------------------------------------------------------------------------------------------------

LAUNCHES = [("pissa", "fsdp2"), ("pissa", "zero3"), ("olora", "zero2"), ("loftq", "fsdp2")]


@pytest.fixture(scope="module")
def train(ranks: Any, weights_folder: Path, conversations: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    known: dict[Any, Any] = {}

    def run(init: str, strategy: str, world_size: int) -> Any:
        if (init, strategy) not in known:
            folder = tmp_path_factory.mktemp("strategy") / "run"
            settings = {"adapter__type": "lora", "adapter__init": init, "train__steps": 4}
            settings |= {"quantization__bits": 4 if init == "loftq" else "none"}
            settings |= {"train__micro_batch_size": scenarios.ROWS_PER_STEP // world_size}
            config = scenarios.configuration(weights_folder, conversations, folder, **settings)
            for seen in ranks(world_size).run(scenarios.train, config, strategy=strategy):
                assert_really_active(seen, strategy, world_size)
            known[init, strategy] = scenarios.read_metrics(folder), load_file(folder / "final" / adapter.WEIGHTS)
        return known[init, strategy]

    return run


@pytest.mark.parametrize(("init", "strategy"), LAUNCHES)
def test_two_processes_train_what_one_does(init: str, strategy: str, train: Any):
    skip_what_this_machine_lacks(strategy)
    expected, expected_adapter = train(init, "single", 1)
    metrics, saved = train(init, strategy, 2)
    assert len(metrics) == 4
    assert_parity(metrics, expected, FP32_TOLERANCE)
    assert saved.keys() == expected_adapter.keys()
    assert all((saved[name] - weight).abs().mean() < 1e-6 for name, weight in expected_adapter.items())


def train_with_a_slow_start(config: Any) -> dict[str, Any]:
    """The recipe, with a start that takes the main process longer than the next collective would wait for it."""
    begin, load, limit = adapter_start.start, model_setup.load_model, timedelta(minutes=30)

    def slow(*args: Any, **kwargs: Any) -> Any:
        time.sleep(5 if os.environ["RANK"] == "0" else 0)
        return begin(*args, **kwargs)

    def hurried(*args: Any) -> Any:
        distributed_c10d._set_pg_timeout(timedelta(seconds=2))
        loaded = load(*args)
        torch.distributed.all_reduce(torch.ones(1))
        distributed_c10d._set_pg_timeout(limit)
        return loaded

    with mock.patch.object(adapter_start, "start", slow), mock.patch.object(model_setup, "load_model", hurried):
        return scenarios.train(config)


def test_processes_wait_for_a_start_longer_than_for_a_collective(
    ranks: Any, weights_folder: Path, conversations: Path, tmp_path: Path
):
    settings = {"adapter__type": "lora", "adapter__init": "pissa", "train__steps": 1}
    config = scenarios.configuration(weights_folder, conversations, tmp_path / "run", **settings)
    for seen in ranks(2).run(train_with_a_slow_start, config, strategy="ddp"):
        assert_really_active(seen, "ddp", 2)


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "bits", "is_stored", "random_weights", "says"),
    [
        ({"init": "pissa"}, 4, False, False, "set adapter.init to loftq"),
        ({"init": "olora"}, 8, False, False, "set adapter.init to loftq"),
        ({"init": "pissa"}, 4, True, False, "published in 4 bits"),
        ({"init": "pissa", "type": "dora"}, "none", False, False, "set adapter.type to lora"),
        ({"init": "loftq", "type": "dora"}, 4, False, False, "set adapter.type to lora"),
        ({"init": "loftq"}, "none", False, False, "set quantization.bits to 4"),
        ({"init": "loftq"}, 8, False, False, "set quantization.bits to 4"),
        ({"init": "loftq"}, 4, True, False, "published in 4 bits"),
        ({"init": "loftq"}, 4, False, True, "model.random_weights has none"),
    ],
)
def test_start_that_cannot_be_is_refused(
    settings: dict[str, Any], bits: Any, is_stored: bool, random_weights: bool, says: str
):
    section = sections.Adapter.model_validate({"type": "lora"} | settings)
    known: dict[str, Any] = {"is_stored": is_stored, "random_weights": random_weights}
    (problem,) = adapter_init_problems(section, bits, **known)
    assert says in problem
    assert adapter_init_problems(section.model_copy(update={"init": "default"}), bits, **known) == []


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"adapter__type": "none"}, r"adapter\.init is set, but adapter\.type is none"),
        ({"adapter__rank": 65}, r"v_proj has only 64; set adapter.rank_pattern to \{k_proj: 64, v_proj: 64\}"),
        ({"adapter__targets": ["lm_head"]}, "another layer uses the weight of lm_head too"),
        ({"quantization__bits": 4}, "set adapter.init to loftq"),
        (
            {"quantization__bits": 4, "adapter__init": "loftq", "adapter__targets": ["lm_head"]},
            "all of adapter.targets keep 16 bits; add layers that are quantised",
        ),
    ],
)
def test_run_is_refused_before_anything_is_loaded(
    settings: dict[str, Any], says: str, weights_folder: Path, conversations: Path, tmp_path: Path
):
    changes = {"adapter__type": "lora", "adapter__init": "pissa"} | settings
    cfg = scenarios.configuration(weights_folder, conversations, tmp_path / "run", **changes)
    with pytest.raises(InputError, match=says):
        preflight.check(cfg, Strategy.from_environment())


def test_plan_refuses_what_the_run_refuses(weights_folder: Path, capsys: pytest.CaptureFixture[str]):
    words = ["--model", weights_folder, "--gpus", "1x4090", "--adapter.type", "lora", "--adapter.init", "loftq"]
    assert commands.main(["plan", *map(str, words)]) == 2
    assert "set quantization.bits to 4" in capsys.readouterr().err


def test_loftq_of_weights_under_other_names_is_refused(weights_folder: Path, tmp_path: Path):
    skeleton = base_of(weights_folder)
    section = sections.Adapter(type="lora", init="loftq")
    file = weights_folder / "model.safetensors"
    assert adapter_start.problems(skeleton, section, [file]) == []
    save_file({f"old.{name}": value for name, value in load_file(file).items()}, tmp_path / "model.safetensors")
    (problem,) = adapter_start.problems(skeleton, section, [tmp_path / "model.safetensors"])
    assert "no model.layers.0.self_attn.q_proj.weight" in problem


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_refused_layer_with_one_output_starts_with_the_rank_that_the_sentence_allows(init: Any, weights_folder: Path):
    def with_gate() -> Any:
        model = base_of(weights_folder)
        torch.manual_seed(0)
        model.model.layers[1].mlp.gate = torch.nn.Linear(128, 1, bias=False)
        return model

    section = sections.Adapter(type="lora", init=init, rank_pattern={"up_proj": 4})
    (problem,) = adapter_start.problems(with_gate(), section, None)
    assert "but model.layers.1.mlp.gate has only 1; set adapter.rank_pattern to {up_proj: 4, gate: 1} or" in problem
    allowed = {"up_proj": 4, "gate": 1}
    section = sections.Adapter(type="lora", init=init, rank_pattern=allowed)
    assert adapter_start.problems(with_gate(), section, None) == []
    model, _ = started(with_gate(), init, rank_pattern=allowed)
    sums = {name: product + frozen for name, product, frozen in layers_of(model)}
    name = "model.layers.1.mlp.gate"
    assert (sums[name] - with_gate().get_submodule(name).weight).abs().max() < 1e-6


def test_loftq_starts_a_tied_output_head_by_default(weights_folder: Path):
    settings: dict[str, Any] = {"targets": ["q_proj", "lm_head"]}
    section = sections.Adapter(type="lora", init="loftq", rank=RANK, **settings)
    assert adapter_start.problems(base_of(weights_folder), section, [weights_folder / "model.safetensors"]) == []
    model, _ = started_in_4_bits(weights_folder, **settings)
    products = {name: product for name, product, _ in layers_of(model)}
    assert {name.split(".")[-1]: bool(product.any()) for name, product in products.items()} == {
        "q_proj": True,
        "lm_head": False,
    }
