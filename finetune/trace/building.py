"""The pieces of the recipe that a step is made of: accelerator, model, optimizer.

The model is made of fake tensors, or of real ones, with random weights.
"""

import contextlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel, initialization

from finetune import distributed
from finetune.compat.fake_tensors import FakeTensor
from finetune.compat.torch_private import without_modes
from finetune.config import sections
from finetune.errors import refuse_if_any
from finetune.models import adapter as adapters
from finetune.models import attention, fp8, frequencies, fused, lora_forward, quantization, text_part
from finetune.models.recomputation import recompute_activations
from finetune.optim.optimizer import build_optimizer
from finetune.trace.setting import Setting
from finetune.training.loss import take_losses


class Params4bit(FakeTensor):
    """A fake weight that Accelerate and PEFT take for bitsandbytes' own, by the name of its class."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Params4bit":
        return self  # PEFT copies a layer, to read it


def start(setting: Setting, strategy: distributed.Strategy) -> Accelerator:
    """The accelerator, in a process that was launched for the strategy of the setting."""
    return distributed.start(
        strategy,
        accumulation=setting.accumulation,
        micro_batch_size=setting.micro_batch_size,
        max_grad_norm=1.0,
        optimizer=setting.optimizer,
        weights=setting.weights,
        largest_parameter=lambda: 0,
        offload_folder=Path(),
    )


def optimizer_of(
    model: torch.nn.Module, setting: Setting, *, fused: bool, one_kernel: bool = True
) -> torch.optim.Optimizer:
    """The optimizer, before the strategy has prepared it.

    Args:
        fused, one_kernel: whether there are kernels of its kind; the latter for weights that are on a GPU.
    """
    return build_optimizer(
        model,
        name=setting.optimizer,
        learning_rate=1e-4,
        weight_decay=0.0,
        weights=setting.weights,
        fused=fused,
        rounding_seed=0,
        one_kernel=one_kernel and setting.one_kernel and setting.placement.optimizer_on == "gpu",
        ema_decay=0.999 if setting.averages else 0.0,
    )


def build(
    config: PreTrainedConfig, setting: Setting, dtype: torch.dtype, *, real: bool = False, device: str = "cpu"
) -> PreTrainedModel:
    """Model and adapter, before the strategy has prepared them.

    Args:
        dtype: in which the recipe loads the weights.
        real: with random weights, to compute with.
        device: to which real weights go that are quantised.

    Raises:
        InputError: if the adapter cannot be attached.
    """
    if setting.flat:
        attention.register()
    chosen: dict[str, Any] = {"attn_implementation": attention.PACKED} if setting.flat else {}
    with contextlib.nullcontext() if real else initialization.no_init_weights():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, **chosen)
    model.tie_weights()  # which the initialisation that was left out does
    frequencies.fix(model, setting.row_tokens)
    adapter = _adapter_of(setting)
    if setting.adapter != "none":
        targets, saved = adapter.targets, adapter.modules_to_save
        quantised = setting.bits is not None
        refuse_if_any(adapters.problems(model, targets=targets, modules_to_save=saved, quantised=quantised))
    if setting.bits and real:
        quantization.quantize(model, setting.bits, dtype, torch.device(device))
    elif setting.bits:
        _quantise(model, setting.bits, dtype)
    if setting.bits:
        # for PEFT; what is loaded by its name has them
        vars(model).update(is_loaded_in_4bit=setting.bits == 4, is_loaded_in_8bit=setting.bits == 8)
        quantization.settle(model, dtype)
    if setting.adapter != "none":
        vocabulary = config.get_text_config().vocab_size
        rows = range(vocabulary - setting.token_rows, vocabulary)
        adapters.attach(model, adapter, base="", revision=None, dtype=dtype, seed=0, token_rows=rows)
    else:
        text_part.train_alone(model, model, dtype if setting.weights == "bf16" else None)
    if setting.activation_checkpointing:
        recompute_activations(model, setting.recomputed_layers, offloads=setting.offloads_activations)
    if setting.fused:
        fused.fuse(model)
        if setting.adapter != "none":
            lora_forward.write_once(model)
    if setting.fp8:
        fp8.multiply_in_fp8(model)
    take_losses(model)
    return model


def _adapter_of(setting: Setting) -> sections.Adapter:
    return sections.Adapter(
        type=setting.adapter,  # type: ignore[arg-type]  # pydantic checks it
        rank=setting.rank,
        alpha=2.0 * setting.rank,
        rank_pattern=dict(setting.ranks),
        dropout=setting.dropout,
        targets=setting.targets if isinstance(setting.targets, str) else list(setting.targets),  # type: ignore[arg-type]
        modules_to_save=list(setting.modules_to_save),
    )


def _quantise(model: PreTrainedModel, bits: int, dtype: torch.dtype) -> None:
    """As ``quantization.quantize``, with plain parameters: bitsandbytes' own classes lose that a tensor is fake.

    8-bit layers have no threshold here. Beyond it, real ones multiply the columns of their input that hold outliers in
    16 bits: how many there are is not in the shapes.
    """
    import bitsandbytes as bnb

    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if type(layer) is not torch.nn.Linear or layer is head:
            continue
        rows, columns, bias = layer.out_features, layer.in_features, layer.bias is not None
        new: Any
        if bits == 4:
            packed, state = bnb.functional.quantize_4bit(
                layer.weight.data, blocksize=64, compress_statistics=True, quant_type="nf4", quant_storage=dtype
            )
            with without_modes():  # its weight, of a class of its own, is replaced
                new = bnb.nn.Linear4bit(columns, rows, bias, compute_dtype=dtype, device="meta")
            weight: Any = torch.nn.Parameter(packed, requires_grad=False)
            weight.quant_state = new.quant_state = state
            weight.bnb_quantized, weight.quant_storage, weight.blocksize = True, dtype, 64
            weight.compress_statistics, weight.quant_type = True, "nf4"
            weight.__class__ = Params4bit
            new.quant_storage = dtype
        else:
            with without_modes():
                new = bnb.nn.Linear8bitLt(columns, rows, bias, has_fp16_weights=False, threshold=0.0, device="meta")
            whole, scales, _ = bnb.functional.int8_vectorwise_quant(layer.weight.data.half())
            weight = torch.nn.Parameter(whole, requires_grad=False)
            weight.CB, weight.SCB, weight.has_fp16_weights = whole, scales, False
        new.weight, new.bias = weight, layer.bias
        new.requires_grad_(False)
        model.set_submodule(name, new)
