"""The dry run: fake tensors take the bytes that real ones take, on one process and as one of several."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from full_trace import FullTrace, full_trace, told
from ranks import Ranks
from thinning import thinned
from torch._subclasses.fake_tensor import FakeTensor
from tracing import begun

from finetune.errors import InputError
from finetune.planner.memory import PART_OF
from finetune.trace import building
from finetune.trace.accounts import CATEGORIES
from finetune.trace.kernel_workspace import inside
from finetune.trace.ledger import Ledger
from finetune.trace.patches import libraries_take_fakes
from finetune.trace.placement import LAUNCHES_ONE_PART
from finetune.trace.setting import Setting
from finetune.training import step

TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 509,  # a prime, which no number of processes divides
    "max_position_embeddings": 1024,
}
HOST_BYTES = {"weights": 64, "gathered": 2**18}
"""More that real processes may hold, by category: the numbers of a device mesh are small tensors, in host memory; and
gloo's threads let go of a buffer when they come to it."""
SETTING = Setting(row_tokens=96)
SETTINGS = {
    "full": SETTING,
    "full, accumulated": replace(SETTING, accumulation=2, micro_batch_size=3),
    "full, checkpointed": replace(SETTING, activation_checkpointing=True),
    "full, bf16": replace(SETTING, weights="bf16"),
    "full, bf16, 8-bit optimizer": replace(SETTING, weights="bf16", optimizer="adamw_8bit"),
    "full, bf16, averaged": replace(SETTING, weights="bf16", averages=True),
    "full, fp32": replace(SETTING, precision="no"),
    "lora": replace(SETTING, adapter="lora"),
    "lora, checkpointed": replace(SETTING, adapter="lora", activation_checkpointing=True),
    "full, offloaded": replace(SETTING, activation_checkpointing=True, offloads_activations=True),
    "lora, offloaded": replace(SETTING, adapter="lora", activation_checkpointing=True, offloads_activations=True),
    "dora, dropout": replace(SETTING, adapter="dora", dropout=0.1),
    "qlora": replace(SETTING, adapter="lora", bits=4),
    "lora, trained head": replace(SETTING, adapter="lora", modules_to_save=("lm_head",)),
}


def exact(setting: Setting, **how: Any) -> FullTrace:
    """Without rounding, and without what the kernels of a GPU would take."""
    return full_trace(TINY, setting, as_on_gpu=False, **how)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_fake_tensors_take_the_bytes_of_real_ones_exactly(setting: Setting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("bitsandbytes.functional.name2qmap", {})  # where it keeps constants that it has made
    assert exact(setting) == exact(setting, real=True)


def real_trace(setting: Setting) -> FullTrace:
    return exact(setting, real=True, rank=int(os.environ["RANK"]))


@pytest.mark.parametrize(
    ("strategy", "adapter"),
    thinned(
        [("ddp", "none"), ("fsdp2", "lora"), ("fsdp2_tp", "none")],
        [("ddp", "lora"), ("fsdp2", "none"), ("fsdp2_tp", "lora")],
    ),
)
def test_trace_as_one_of_two_processes_is_what_each_of_two_real_ones_holds(
    strategy: str, adapter: str, ranks: Callable[[int], Ranks]
):
    setting = replace(SETTING, strategy=strategy, world_size=2, adapter=adapter, accumulation=2)
    launched_as = LAUNCHES_ONE_PART if setting.shards_parts else strategy  # where it is a part, which both shard
    found = ranks(2).run(real_trace, setting, strategy=launched_as, mixed_precision="bf16")
    for rank, real in enumerate(found):
        fake = exact(setting, rank=rank)
        # not what is alive in the backward pass and the step: of that, gloo's threads let go when they come to it
        for one, other in ((fake.held, real.held), (fake.saved, real.saved)):
            for category in CATEGORIES:
                difference = other.categories.get(category, 0) - one.categories.get(category, 0)
                assert 0 <= difference <= HOST_BYTES.get(category, 0), category
        # a buffer of reduced gradients may outlive their sum in the same way
        gradients = [trace.phases["step"].categories["gradients"] for trace in (fake, real)]
        assert gradients[1] in (gradients[0], 2 * gradients[0])


ENGINES = {
    # with rows enough that the peak is in the backward pass: in the step, a real engine lets go of less
    f"{adapter}-{strategy}": replace(
        SETTING, strategy=strategy, world_size=2, adapter=adapter, accumulation=2, micro_batch_size=4
    )
    for strategy in ("zero1", "zero2", "zero3")
    for adapter in ("none", "lora")
}
LEFT_TO_PROVE = ["lora-zero1", "none-zero2"]
GROWING = [
    replace(ENGINES["lora-zero1"], activation_checkpointing=True, micro_batch_size=rows)
    for rows in (1, 3)  # beside an adapter, embedded rows are a leaf and keep their gradient
]


@pytest.fixture(scope="module", autouse=True)
def in_children(request: pytest.FixtureRequest) -> "Iterator[dict[tuple[Setting, int], Future[FullTrace]]]":
    """Traces by setting and rank, of the engines that are tried."""
    points = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    tried = [ENGINES[name] for name in ENGINES if any(each.get("engine") == name for each in points)]
    asked = {(setting, rank): partial(exact, setting, rank=rank) for setting in tried for rank in (0, 1)}
    asked |= {(setting, 0): partial(exact, setting) for setting in GROWING}
    with begun(asked) as traces:
        yield traces


@pytest.mark.parametrize("engine", thinned([each for each in ENGINES if each not in LEFT_TO_PROVE], LEFT_TO_PROVE))
def test_traced_engine_holds_what_each_of_two_real_ones_holds(
    engine: str, in_children: "dict[tuple[Setting, int], Future[FullTrace]]", ranks: Callable[[int], Ranks]
):
    setting = ENGINES[engine]
    found = ranks(2).run(real_trace, setting, strategy=setting.strategy, mixed_precision="bf16")
    for rank, real in enumerate(found):
        fake = in_children[setting, rank].result()
        for category in ("weights", "optimizer"):
            assert fake.held.categories[category] == real.held.categories[category] > 0
        hidden_states = 2 * 64 * setting.tokens  # a real engine keeps one longer now and then
        beside = HOST_BYTES["gathered"] + hidden_states
        assert abs(fake.saved.bytes - real.saved.bytes) <= beside
        assert abs(fake.peak.bytes - real.peak.bytes) <= beside


def test_gradients_that_grow_with_the_micro_batch_are_not_those_of_weights(
    in_children: "dict[tuple[Setting, int], Future[FullTrace]]",
):
    one, three = (in_children[setting, 0].result().phases["step"].categories for setting in GROWING)
    assert one["gradients"] == three["gradients"] > 0
    assert three["temporaries"] > one["temporaries"]


def test_optimizer_state_is_twice_the_masters():
    trace = exact(SETTING)
    parameters = 2 * 509 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64) + 64
    steps = 21 * 4  # a counter for each tensor
    assert trace.held.categories["optimizer"] == 2 * 4 * parameters + steps
    assert trace.phases["step"].categories["gradients"] == 4 * parameters


def test_averages_are_state_of_the_optimizer_as_large_as_the_masters():
    averaged, plain = (exact(replace(SETTING, averages=each)).held.categories for each in (True, False))
    steps = 21 * 4
    assert averaged["optimizer"] == plain["optimizer"] + (plain["optimizer"] - steps) / 2
    assert {name for name in plain if plain[name] != averaged[name]} == {"optimizer"}


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_every_rank_of_a_sharded_model_holds_the_shards_of_its_size(world_size: int):
    skeleton = {"embed": (509, 64), "head": (509, 64), "norm": (64,)}
    layer = {"q": (64, 64), "o": (64, 64), "k": (32, 64), "v": (32, 64), "gate": (160, 64), "up": (160, 64)}
    layer |= {"down": (64, 160), "norm1": (64,), "norm2": (64,)}
    shapes = [*skeleton.values(), *layer.values(), *layer.values()]
    padded = [4 * -(-shape[0] // world_size) * (shape[1] if len(shape) > 1 else 1) for shape in shapes]
    buffers = 2 * 4 * 8  # of rotary embeddings, which are not split
    setting = replace(SETTING, strategy="fsdp2", world_size=world_size)
    for rank in {0, world_size - 1}:
        trace = exact(setting, rank=rank)
        assert trace.held.categories["weights"] == sum(padded) + buffers
        assert trace.phases["step"].categories["gradients"] == sum(padded)


class Packed:
    """A tensor that autograd has kept; its end is that of the graph's node."""

    kept: ClassVar[dict[int, tuple[int, int]]] = {}

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, storage = tensor, tensor.untyped_storage()
        address = storage.data_ptr()
        size, count = self.kept.get(address, (storage.nbytes(), 0))
        self.kept[address] = (size, count + 1)
        self.address = address

    def __del__(self) -> None:
        size, count = self.kept.pop(self.address)
        if count > 1:
            self.kept[self.address] = (size, count - 1)


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_saved_bytes_are_those_that_autograd_keeps(adapter: str, monkeypatch: pytest.MonkeyPatch):
    kept: list[int] = []
    models: list[torch.nn.Module] = []
    built, scaled = building.build, step.scaled

    def build(*args: Any, **kwargs: Any) -> Any:
        models.append(built(*args, **kwargs))
        return models[0]

    def count(loss: torch.Tensor, factor: float) -> torch.Tensor:
        own = [*models[0].parameters(), *models[0].buffers()]
        weights = {tensor.untyped_storage().data_ptr() for tensor in own}
        kept.append(sum(size for address, (size, _) in Packed.kept.items() if address not in weights))
        return scaled(loss, factor)

    setting = replace(SETTING, precision="no", adapter=adapter)
    with monkeypatch.context() as patch, torch.autograd.graph.saved_tensors_hooks(Packed, lambda each: each.tensor):
        patch.setattr(building, "build", build)
        patch.setattr(step, "scaled", count)
        real = exact(setting, real=True)
    fake = exact(setting)
    saved = fake.saved.categories["activations"]
    assert saved == real.saved.categories["activations"]
    # alive too: a frozen embedding does not keep its input, and the loss keeps no labels, nor the tokens of their line
    loss, inputs = 4, 8 * 96 * (2 if adapter == "lora" else 1) + 8
    of_hidden_states = 4 * 96 * 64  # gradients, made with the loss
    # what down_proj's adapter keeps, under the hooks of its input, which is computed again
    under_others = 4 * 96 * setting.rank * TINY["num_hidden_layers"] if adapter == "lora" else 0
    assert saved == kept[-1] + loss + inputs + of_hidden_states + under_others
    assert "logits" not in fake.saved.categories


def test_ledger_counts_storages_not_views_and_hears_of_their_ends():
    ledger = Ledger()
    with ledger:
        ledger.begin("forward")
        whole = torch.zeros(100, 10)  # 4,000 bytes: 4,096 as the allocator gives them
        part = whole[:5]
        whole.add_(1)
        assert sum(block.bytes for block in ledger.live.values()) == 4096
        del whole
        assert len(ledger.live) == 1  # the view keeps it
        part.untyped_storage().resize_(0)
        assert sum(block.bytes for block in ledger.live.values()) == 0
        part.untyped_storage().resize_(1000)
        assert sum(block.bytes for block in ledger.live.values()) == 1024
        del part
        assert ledger.live == {}


def test_what_a_block_is_for_follows_from_its_life():
    ledger = Ledger(as_on_gpu=False)
    with ledger:
        weight = torch.zeros(10)
        ledger.built = ledger.events
        bucket = torch.zeros(5)
        ledger.begin("forward")
        kept, dropped = torch.zeros(20), torch.zeros(40)
        del dropped
        ledger.begin("loss")
        scores = torch.zeros(3, 7)
        ledger.begin("backward")
        gradient = torch.zeros(10)
        ledger.tell([gradient], "gradients")
        del kept, scores
        ledger.begin("step")
        state = torch.zeros(80)
        del gradient
        ledger.begin("forward")
    trace = told(ledger, {3}, 7)
    before = {"weights": 40, "gathered": 20}
    assert trace.held.categories == before
    assert trace.phases["forward"].categories == before | {"activations": 80, "temporaries": 160}
    assert trace.phases["loss"].categories == before | {"activations": 80, "logits": 84}
    assert trace.phases["backward"].categories == trace.phases["loss"].categories | {"gradients": 40}
    assert trace.phases["step"].categories == before | {"gradients": 40, "optimizer": 320}
    assert weight.numel() + bucket.numel() + state.numel() == 95


def test_kernels_take_what_their_sources_say():
    query, key = torch.empty(2, 32, 1000, 128, device="meta").bfloat16(), torch.empty(2, 8, 1000, 128, device="meta")
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu_backward"
    accumulated = 4 * 2 * 1000 * 32 * 128 + 4 * 2 * 1000 * 32
    expanded = 2 * 2 * 2 * 32 * 1000 * 128
    assert inside(attention, (None, query, key.bfloat16()), None) == accumulated + expanded
    assert inside(attention, (None, query, query), None) == accumulated
    many, few = torch.empty(2048, 64, device="meta").bfloat16(), torch.empty(8, 64, device="meta").bfloat16()
    scales = torch.empty(512, device="meta")
    dequantised = inside("bitsandbytes::gemm_4bit", (many, None, (512, 64), scales, 64), None)
    assert dequantised == 2 * 512 * 64 + 8 * 512
    assert inside("bitsandbytes::gemm_4bit", (few, None, (512, 64), scales, 64), None) == 0


def test_packed_rows_save_what_one_row_of_attention_saves():
    packed = exact(replace(SETTING, layout="packed", micro_batch_size=2))
    apart = exact(replace(SETTING, micro_batch_size=2))
    tokens, layers, heads = 192, 2, 4
    # bounds, positions, and rotary embeddings for each row; the random state of each layer's kernel
    beside = packed.saved.bytes - apart.saved.bytes
    assert 0 <= beside <= 4 * 3 + 8 * tokens + 2 * 4 * 16 * tokens + layers * (8 * 2 + 4 * heads)
    assert any("varlen" in operation for _, operation, *_ in packed.alive)


def test_planner_knows_what_every_block_is_for():
    assert set(PART_OF) == set(CATEGORIES)
    for setting in (SETTING, replace(SETTING, strategy="fsdp2", world_size=2, adapter="lora", bits=4)):
        for moment in exact(setting).phases.values():
            assert set(moment.categories) <= set(CATEGORIES)


def test_state_in_host_memory_is_in_no_moment_of_the_gpu():
    setting = replace(SETTING, strategy="fsdp2_offload", world_size=2)
    trace, on_gpu = exact(setting), exact(replace(setting, strategy="fsdp2"))
    assert not {"weights", "gradients", "optimizer"} & set(trace.peak.categories)
    held = on_gpu.phases["step"].categories
    assert trace.host_bytes == held["weights"] + held["gradients"] + held["optimizer"]


def test_scales_of_offloaded_4_bit_weights_stay_on_the_gpu():
    setting = replace(SETTING, strategy="fsdp2_offload", world_size=2, adapter="lora", bits=4)
    trace, on_gpu = exact(setting), exact(replace(setting, strategy="fsdp2"))
    held = on_gpu.phases["step"].categories
    scales = trace.held.categories["weights"]
    assert trace.host_bytes == held["weights"] - scales + held["gradients"] + held["optimizer"]
    blocks = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 160 * 64) // 64
    code, code_of_scales, scale_of_scales, offset = 4 * 16, 4 * 256, 4, 4
    of_weights = blocks + 14 * (code + code_of_scales + scale_of_scales + offset)
    assert scales - of_weights in (0, code_of_scales)  # bitsandbytes keeps one for itself, made when it is first used


@pytest.fixture
def untouched() -> Iterator[None]:
    """This process is afterwards what it was before."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    data_pointer = vars(FakeTensor).get("data_ptr")
    apply, resize = torch.nn.Module._apply, torch.UntypedStorage.resize_
    yield
    assert {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"} == environment
    assert not dist.is_initialized()
    assert PartialState._shared_state == {}
    assert vars(FakeTensor).get("data_ptr") is data_pointer
    assert torch.nn.Module._apply is apply
    assert torch.UntypedStorage.resize_ is resize


@pytest.mark.usefixtures("untouched")
def test_dry_run_leaves_the_process_as_it_was():
    exact(replace(SETTING, strategy="hsdp", world_size=4), rank=3)


@pytest.mark.usefixtures("untouched")
def test_patches_are_undone_after_an_error():
    with pytest.raises(ZeroDivisionError), libraries_take_fakes():
        raise ZeroDivisionError


@pytest.mark.parametrize(
    ("model", "setting", "words"),
    [
        (TINY, replace(SETTING, bits=4), "set adapter.type to lora"),
        (TINY, replace(SETTING, world_size=2), "single is for one GPU"),
        (TINY | {"model_type": "lllama"}, SETTING, "no model that transformers knows"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_traced_is_refused_in_a_sentence(model: Any, setting: Setting, words: str):
    with pytest.raises(InputError, match=words):
        full_trace(model, setting)


@pytest.mark.parametrize(("strategy", "context"), thinned([("cp", 4), ("ulysses", 2)], [("cp", 2), ("ulysses", 4)]))
def test_gpus_that_compute_rows_together_keep_what_one_keeps_of_its_positions_and_what_they_send_one_another(
    strategy: str, context: int
):
    tokens, layers, width, key_heads = 96, 2, 16, 2
    base = replace(SETTING, strategy="fsdp2", world_size=4, layout="flat", row_tokens=tokens)
    shared = replace(base, strategy=strategy, context=context, row_tokens=context * tokens)
    found, alone = (exact(each).saved.categories["activations"] for each in (shared, base))
    keys_and_values = 2 * 2 * key_heads * width * tokens
    beside = {
        "cp": context * keys_and_values,  # of a row and a chunk, in the place of its own
        # outputs before they are sent too; where there are fewer heads, keys and values several times
        "ulysses": 2 * 4 * width * tokens + (max(1, context // key_heads) - 1) * keys_and_values,
    }
    assert found - alone == layers * beside[strategy]
