"""What autograd keeps for the backward pass, byte for byte, in real small models and on the planner's tape."""

import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedModel

from finetune.planner import build as build_module
from finetune.planner import decoder
from finetune.planner.build import Built, build
from finetune.planner.families import FAMILIES
from finetune.planner.operations import Operations
from finetune.planner.peak_memory import numerics_of, step_memory
from finetune.planner.shape import shape_of
from finetune.planner.tape import Memory, Node, Parameter, Storage, Tensor, leaf, run_backward
from finetune.trace.building import build as build_model
from finetune.trace.placement import placement_of
from finetune.trace.setting import Setting
from finetune.training.loss import token_loss_sum

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 224,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 641,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "phi3": {"head_dim": None, "hidden_size": 144, "pad_token_id": 0},
    "qwen2": {"head_dim": None, "hidden_size": 144},
    "smollm3": {"pad_token_id": 0},
    "gemma2": {"sliding_window": 20, "query_pre_attn_scalar": 24},
    "gemma3_text": {"sliding_window": 20, "num_hidden_layers": 6, "query_pre_attn_scalar": 24},
    "olmo3": {"sliding_window": 20, "num_hidden_layers": 5},
    "mistral": {"sliding_window": 20},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "norm_topk_prob": True},
}
SETTING = Setting(row_tokens=50)
LORA = replace(SETTING, adapter="lora", rank=5)
SETTINGS = {
    "full": SETTING,
    "two rows": replace(SETTING, micro_batch_size=2),
    "bf16": replace(SETTING, weights="bf16"),
    "fp32": replace(SETTING, precision="no"),
    "lora": LORA,
    "lora fp32": replace(LORA, precision="no"),
    "lora bf16": replace(LORA, weights="bf16"),
    "lora qv": replace(LORA, targets=("q_proj", "v_proj")),
    "lora dropout": replace(LORA, dropout=0.1),
    "dora": replace(LORA, adapter="dora"),
    "dora dropout": replace(LORA, adapter="dora", dropout=0.1),
    "qlora": replace(LORA, bits=4),
    "8-bit": replace(LORA, bits=8),
    "trained embedding and head": replace(LORA, modules_to_save=("embed_tokens", "lm_head")),
    "full, checkpointed": replace(SETTING, activation_checkpointing=True),
    "lora, checkpointed": replace(LORA, activation_checkpointing=True),
    "bf16, checkpointed": replace(SETTING, weights="bf16", activation_checkpointing=True),
    "trained head": replace(LORA, modules_to_save=("lm_head",)),
}


def of_family(family: str, **changes: Any) -> dict[str, Any]:
    fields = MODEL | {"model_type": family} | OF_FAMILY.get(family, {}) | changes
    return {name: value for name, value in fields.items() if value is not None}


def model_of(fields: dict[str, Any], setting: Setting) -> PreTrainedModel:
    """As a strategy leaves it on one process: trained weights in fp32, unless asked otherwise."""
    config = AutoConfig.for_model(**fields)
    in_fp32 = setting.precision == "no"
    model = build_model(config, setting, torch.float32 if in_fp32 else torch.bfloat16, real=True)
    for parameter in model.parameters():
        if parameter.requires_grad and setting.weights == "fp32_master":
            parameter.data = parameter.data.float()
    return model.train()


class Kept:
    """A tensor that autograd has kept, for as long as it keeps it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def really_saved(fields: dict[str, Any], setting: Setting) -> int:
    """Bytes of the storages that autograd keeps after a forward pass, each once, without weights and inputs."""
    model = model_of(fields, setting)
    tokens = torch.randint(0, 600, (setting.micro_batch_size, setting.row_tokens))
    labels = torch.randint(0, 600, (setting.micro_batch_size, setting.row_tokens))
    known = {each.untyped_storage().data_ptr() for each in [*model.parameters(), *model.buffers(), tokens, labels]}
    kept: weakref.WeakSet[Kept] = weakref.WeakSet()

    def pack(tensor: torch.Tensor) -> Kept:
        packed = Kept(tensor)
        kept.add(packed)
        return packed

    autocast = numerics_of(setting, on_gpu=False).autocast
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            logits = model(input_ids=tokens, use_cache=False).logits
        loss = token_loss_sum(logits.float(), labels)
    storages = {packed.tensor.untyped_storage().data_ptr(): packed.tensor.untyped_storage() for packed in kept}
    assert loss.requires_grad
    return sum(storage.nbytes() for address, storage in storages.items() if address not in known)


def on_tape(fields: dict[str, Any], setting: Setting) -> tuple[Built, Operations, Memory]:
    memory = Memory(block_bytes=1)
    numerics = numerics_of(setting, on_gpu=False)
    placement = placement_of(setting.strategy, setting.world_size)
    built = build(memory, shape_of(fields), setting, placement, numerics, enter=lambda phase: None)
    ops = Operations(memory, numerics, rows=setting.micro_batch_size, row_tokens=setting.row_tokens)
    return built, ops, memory


def saved_on_tape(fields: dict[str, Any], setting: Setting) -> int:
    built, ops, _ = on_tape(fields, setting)
    loss = built.decoder.forward(ops, casts_logits=ops.numerics.autocast)
    assert loss.node is not None
    weights = {id(parameter.storage) for parameter in built.parameters}
    found = {}
    for node in nodes_behind(loss.node):
        found.update({id(storage): storage.size for storage in node.saved})
        if node.frame is not None:
            found[id(node.frame.given)] = node.frame.given.size
    return sum(size for key, size in found.items() if key not in weights)


def nodes_behind(root: Node) -> Iterator[Node]:
    seen, stack = {root}, [root]
    while stack:
        node = stack.pop()
        yield node
        fresh = {source for source in node.inputs if source is not None} - seen
        seen |= fresh
        stack.extend(fresh)


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_saved_bytes_are_exact_in_every_mode(setting: Setting):
    assert saved_on_tape(MODEL, setting) == really_saved(MODEL, setting)


@pytest.mark.parametrize("family", [family for family in FAMILIES if not FAMILIES[family].is_mixture])
@pytest.mark.parametrize("setting", [SETTING, LORA, replace(LORA, weights="bf16", micro_batch_size=2)], ids=repr)
def test_saved_bytes_are_exact_in_every_family(family: str, setting: Setting):
    fields = of_family(family)
    assert saved_on_tape(fields, setting) == really_saved(fields, setting)


@pytest.mark.parametrize("family", [family for family in FAMILIES if FAMILIES[family].is_mixture])
def test_saved_bytes_of_a_mixture_are_exact_in_bf16(family: str):
    """Routers' small tensors included. In fp32 masters, its grouped products are not to be had on every device."""
    fields, setting = of_family(family), replace(SETTING, weights="bf16")
    assert saved_on_tape(fields, setting) == really_saved(fields, setting)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("strategy", ["single", "fsdp2", "zero3"])
def test_step_of_every_family_is_gone_through(family: str, adapter: str, strategy: str):
    setting = Setting(strategy=strategy, world_size=1 if strategy == "single" else 2, adapter=adapter, row_tokens=64)
    shape = shape_of(of_family(family))
    plain = step_memory(shape, setting)
    checkpointed = step_memory(shape, replace(setting, activation_checkpointing=True))
    assert 0 < checkpointed.phases["loss"] < plain.phases["loss"]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    "setting",
    [
        SETTING,
        LORA,
        replace(SETTING, activation_checkpointing=True),
        replace(LORA, activation_checkpointing=True, bits=8, accumulation=2),
        replace(SETTING, strategy="fsdp2", world_size=2),
        replace(LORA, strategy="hsdp", world_size=4, activation_checkpointing=True),
    ],
    ids=["full", "lora", "full checkpointed", "8-bit checkpointed", "sharded", "sharded lora checkpointed"],
)
def test_layers_that_pass_as_a_lump_weigh_what_they_weigh_one_by_one(
    setting: Setting, windowed: bool, monkeypatch: pytest.MonkeyPatch
):
    shape = shape_of(of_family("gemma3_text" if windowed else "llama", num_hidden_layers=14))
    lumped = step_memory(shape, setting, on_gpu=False)
    for module in (decoder, build_module):
        monkeypatch.setattr(module, "LAYERS_IN_FULL", 14)
    whole = step_memory(shape, setting, on_gpu=False)
    assert lumped.peak == whole.peak
    assert lumped.phases == whole.phases


def one(memory: Memory, node: Node | None = None, kind: str = "activations") -> Tensor:
    return Tensor(Storage(memory, 512, kind), 128, 4, node)


def test_release_of_a_storage_runs_no_python_code_in_which_an_interrupt_would_be_dropped():
    memory, called = Memory(), []
    storage = Storage(memory, 512)
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_name) if event == "call" else None)
    del storage
    sys.setprofile(None)
    assert called == []
    assert memory.total == sum(memory.live.values()) == 0


def test_backward_runs_the_latest_operation_first_and_each_when_all_its_gradients_are_there():
    memory, ran = Memory(), []

    def step(name: str, inputs: list[Tensor]) -> Tensor:
        def backward(arrived: list[Tensor]) -> list[Tensor | None]:
            ran.append(name)
            return [one(memory) for _ in inputs]

        return one(memory, Node(inputs, [], backward))

    weight = Parameter(Storage(memory, 512, "weights"), 128, 4, trained=True)
    first = step("first", [weight])
    short, long = step("short", [first]), step("long", [first])
    last = step("last", [short, step("longer", [long])])
    assert last.node is not None
    run_backward(last.node, [one(memory)])
    assert ran == ["last", "longer", "long", "short", "first"]
    assert weight.grad is not None
    assert memory.live["gradients"] == 512


@pytest.mark.parametrize(("in_place", "highest"), [(True, 2), (False, 3)])
def test_gradients_that_meet_are_added_in_place_unless_an_operation_watches(in_place: bool, highest: int):
    memory = Memory(adds_in_place=in_place)
    weight = Parameter(Storage(memory, 0, "weights"), 128, 4, trained=True)
    split = Tensor(weight.storage, 128, 4, Node([weight, weight], [], lambda arrived: [one(memory), one(memory)]))
    assert split.node is not None
    memory.restart()
    run_backward(split.node, [Tensor(weight.storage, 128, 4)])
    assert memory.peak == highest * 512
    assert memory.total == 512


def test_what_a_node_saved_goes_when_it_has_run_and_what_it_pinned_with_the_graph():
    memory = Memory()
    weight = Parameter(Storage(memory, 0, "weights"), 128, 4, trained=True, kept_width=0)
    node = Node([weight], [Storage(memory, 1024)], lambda arrived: [one(memory)], [Storage(memory, 2048)])
    run_backward(node, [one(memory)])
    assert memory.total == 2048
    del node
    assert memory.total == 0


def test_gradient_of_a_leaf_stays_until_the_graph_goes():
    memory = Memory()
    x = leaf(one(memory))
    node = Node([x], [], lambda arrived: [one(memory)])
    del x
    run_backward(node, [one(memory)])
    assert memory.total == 1024
    del node
    assert memory.total == 0


def test_checkpointed_function_runs_again_when_its_first_saved_tensor_is_asked_for():
    memory, runs = Memory(), []
    numerics = numerics_of(Setting(precision="no"), on_gpu=False)
    ops = Operations(memory, numerics, rows=1, row_tokens=128)
    weight = Parameter(Storage(memory, 512, "weights"), 128, 4, trained=True)

    def function(x: Tensor) -> Tensor:
        runs.append(memory.total)
        return ops.scale(ops.activate(ops.activate(x)))

    output = ops.checkpoint(function, ops.scale(weight))
    held = memory.total
    assert held == 3 * 512  # weight, input, output
    assert output.node is not None
    run_backward(output.node, [one(memory)])
    assert len(runs) == 2
    assert runs[1] > held
    assert memory.live["gradients"] == 512


def test_step_memory_of_large_models_takes_milliseconds():
    fields = {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128}
    shape = shape_of(of_family("llama", num_key_value_heads=8, head_dim=128, vocab_size=128256, **fields))
    began = time.perf_counter()
    step_memory(shape, Setting(strategy="fsdp2", world_size=64, row_tokens=8192, activation_checkpointing=True))
    assert time.perf_counter() - began < 0.5  # 0.01 on an idle machine
