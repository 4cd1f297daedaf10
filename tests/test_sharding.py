"""Each process proves how much it holds of what a strategy shards; a base that stays whole is an error."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import scenarios
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from finetune.config import compatibility
from finetune.config.strategy_names import IN_PARTS, SHARDED_PARTS, SIZES
from finetune.distributed import Strategy, loading_device, weight_loading
from finetune.distributed.sharding import Sharding
from finetune.errors import InputError
from finetune.models import loading as models
from finetune.models import quantization
from recipes import sft

QLORA = {"adapter__type": "lora", "adapter__rank": 8, "quantization__bits": 4, "train__steps": 1}


def configuration(model: Path, rows: Path, output: Path, **changes: Any) -> Any:
    return scenarios.configuration(model, rows, output, **QLORA | {"train__micro_batch_size": 2} | changes)


@pytest.mark.parametrize(("strategy", "world_size"), [("fsdp2", 2), ("fsdp2", 4), ("hsdp", 4), ("zero3", 2)], ids=str)
def test_bytes_in_run_yaml_are_those_of_the_quantised_model_and_its_adapter(
    strategy: str, world_size: int, ranks: Any, weights_folder: Path, conversations: Path, tmp_path: Path
):
    config = configuration(weights_folder, conversations, tmp_path / "run")
    everyone = ranks(world_size).run(scenarios.train, config, strategy=strategy)
    assert {seen["world_size"] for seen in everyone} == {world_size}
    found = yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["strategy"]["sharding"]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(weights_folder))
    linear = sum(m.weight.numel() for m in model.model.modules() if isinstance(m, torch.nn.Linear))
    other = sum(p.numel() for p in model.parameters()) - linear
    adapter = 8 * sum(m.in_features + m.out_features for m in model.model.modules() if isinstance(m, torch.nn.Linear))
    masters = 4 * adapter if strategy == "zero3" else 0
    assert found["total_bytes"] == linear // 2 + 4 * (other + adapter) + masters
    assert found["shards"] == world_size // (2 if strategy == "hsdp" else 1)
    assert found["held_bytes"] == pytest.approx(found["total_bytes"] / found["shards"], rel=0.01)
    blocks = linear // 64  # a byte of scale a block, and 4 bytes for 256 scales (rounded up in each layer)
    assert blocks < found["constants_bytes"] < 1.2 * blocks


def train_with_bytes_as_storage(config: Any) -> None:
    """The default of bitsandbytes, which Accelerate then leaves whole on every process with a warning."""
    original = quantization.bitsandbytes_config

    def in_bytes(*args: Any) -> Any:
        made = original(*args)
        made.bnb_4bit_quant_storage = torch.uint8
        return made

    with mock.patch.object(quantization, "bitsandbytes_config", in_bytes), mock.patch.object(quantization, "settle"):
        sft.main(config)


def train_without_the_table(config: Any) -> None:
    with mock.patch.object(compatibility, "RULES", ()):
        sft.main(config)


def test_base_that_sharding_leaves_out_is_an_error(
    ranks: Any, weights_folder: Path, conversations: Path, tmp_path: Path
):
    config = configuration(weights_folder, conversations, tmp_path / "run")
    with pytest.raises(AssertionError, match="fsdp2 with unsharded parameters with 2 is active; nothing was trained"):
        ranks(2).run(train_with_bytes_as_storage, config, strategy="fsdp2")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_second_reference_that_keeps_a_base_whole_is_an_error(
    ranks: Any, weights_folder: Path, conversations: Path, tmp_path: Path
):
    config = configuration(weights_folder, conversations, tmp_path / "run", quantization__bits=8)
    with pytest.raises(
        AssertionError, match=r"each of 2 processes should hold 0\.\d MiB, but this one holds 0\.\d MiB"
    ):
        ranks(2).run(train_without_the_table, config, strategy="zero3")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("strategy", "size", "expected"),
    [
        ("single", 20, "cuda:0"),
        ("fsdp2", 10, "cuda:0"),  # whole, beside its shards
        ("fsdp2", 20, "cpu"),
        ("hsdp", 40, "cpu"),
        ("zero3", 20, "cuda:0"),
        ("zero3", 40, "zero3 first puts the whole quantised model, 40.0 GiB, on each GPU, but only 24.0 GiB are free"),
        ("single", 40, "single first puts the whole quantised model, 40.0 GiB"),
    ],
)
def test_quantised_weights_are_read_to_the_gpu_where_it_has_room(
    strategy: str, size: int, expected: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 * 2**30, 24 * 2**30))
    accelerator: Any = mock.Mock(device=torch.device("cuda:0"))
    launched = Strategy(strategy, 0, 4, 2 if strategy == "hsdp" else 1, "bf16", rehearsal=False)
    try:
        found = str(loading_device(accelerator, launched, size * 2**30))
    except InputError as error:
        found = str(error)
    assert found.startswith(expected)


@pytest.mark.parametrize("strategy", [*IN_PARTS, *SHARDED_PARTS])
def test_a_process_that_takes_a_part_of_a_model_reads_it_in_host_memory_and_writes_into_its_own(
    strategy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (24 * 2**30, 24 * 2**30))
    accelerator: Any = mock.Mock(device=torch.device("cuda:1"), is_main_process=False)
    sizes = {size.field: 2 for size in SIZES[strategy]}
    launched = Strategy(strategy, 1, 4, 1, "bf16", rehearsal=False, **sizes)
    assert str(loading_device(accelerator, launched, 40 * 2**30)) == "cpu"
    assert weight_loading.counts(accelerator, launched, quantised=False)


def test_bytes_of_a_quantised_model_are_told_from_its_shapes():
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "vocab_size": 128256}
    config = LlamaConfig(**sizes, num_attention_heads=32, num_key_value_heads=8, tie_word_embeddings=False)
    model = models.without_weights(config, trust_remote_code=False)
    assert quantization.quantised_bytes(model, 4) / 2**30 == pytest.approx(5.31, abs=0.01)  # 3.600 + 2.101 GB


@pytest.mark.parametrize(("held", "is_problem"), [(25_000_000, False), (27_000_000, False), (29_000_000, True)])
def test_more_than_a_share_is_a_problem_and_padding_is_none(held: int, is_problem: bool):
    sharding = Sharding("weights", 4, total_bytes=100_000_000, held_bytes=held, constants_bytes=0)
    assert (sharding.problem() is not None) == is_problem


def test_line_for_the_screen_tells_share_and_constants():
    text = Sharding("weights", 2, total_bytes=2**31, held_bytes=2**30, constants_bytes=2**20).describe()
    assert text == "weights on this process: 1.0 GiB of 2.0 GiB, 1/2; plus 1.0 MiB of quantisation constants"
    assert Sharding("weights", 1, 2**20, 2**20, 0).describe() == "weights on this process: 1.0 MiB, nothing sharded"
