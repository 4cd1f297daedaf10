"""The weights that a token is multiplied with, that are trained, and that are stored in fewer bits."""

from dataclasses import dataclass

from finetune.planner.shape import Linear, ModelShape
from finetune.planner.trained import adapter_parameters, is_adapted
from finetune.trace.setting import Setting

BYTES_OF_4_BIT, BYTES_OF_8_BIT = 0.516, 1.0
"""A weight's, with its scales: NF4 with double quantisation (arXiv:2305.14314), LLM.int8."""


@dataclass(frozen=True)
class Matrices:
    """Numbers of weights, of the whole model."""

    layer_matrices: int
    """Those that a token meets in the linear layers of all decoder layers."""
    all_layer_matrices: int
    """With the experts that it does not meet."""
    quantised: int
    head: int
    adapted: int
    """Those beside which an adapter lies."""
    adapter: int
    """Of the adapter's own matrices, those that a token meets."""
    trained: int
    """Elements of all that is trained, vectors too."""
    trained_matrices: int
    """Those of the trained that tokens are multiplied with."""
    trained_base: int
    """Trained matrices that are not an adapter's."""
    bytes: float
    """Of all weights, as a layer computes with them or dequantises them."""

    @classmethod
    def of(cls, shape: ModelShape, setting: Setting) -> "Matrices":
        """Count them.

        Raises:
            InputError: if the adapter's names match nothing in the model.
        """
        head = shape.hidden * shape.vocabulary
        layer_matrices = shape.layers * sum(each.inputs * each.outputs * met(each, shape) for each in shape.linears)
        every = shape.layers * shape.layer_linear_parameters
        width = 2 if in_16_bits(setting) else 4
        if setting.adapter == "none":
            return cls(
                layer_matrices=layer_matrices,
                all_layer_matrices=every,
                quantised=0,
                head=head,
                adapted=0,
                adapter=0,
                trained=shape.parameters,
                trained_matrices=layer_matrices + head,
                trained_base=every + head,
                bytes=width * shape.parameters,
            )
        adapter = adapter_parameters(
            shape,
            kind="dora" if setting.adapter == "dora" else "lora",
            rank=setting.rank,
            targets=setting.targets,
            modules_to_save=setting.modules_to_save,
        )
        saved = shape.layers * sum(
            each.matrix_parameters for each in shape.linears if each.name in setting.modules_to_save
        )
        saved += head if "lm_head" in setting.modules_to_save else 0
        stored = {None: float(width), 8: BYTES_OF_8_BIT, 4: BYTES_OF_4_BIT}[setting.bits]
        quantised = shape.quantised_linear_parameters
        adapted = adapted_linears(shape, setting)
        met_adapter = round(adapter.matrices * _met_share(adapted, shape))
        return cls(
            layer_matrices=layer_matrices,
            all_layer_matrices=every,
            quantised=quantised if setting.bits else 0,
            head=head,
            adapted=shape.layers * sum(each.matrix_parameters for each in adapted),
            adapter=met_adapter,
            trained=adapter.total,
            trained_matrices=met_adapter + saved,
            trained_base=saved,
            bytes=stored * quantised + width * (shape.parameters - quantised + adapter.total),
        )


def in_16_bits(setting: Setting) -> bool:
    """Whether matrices are multiplied in bf16 or fp16."""
    return setting.precision != "no" or setting.weights == "bf16"


def met(linear: Linear, shape: ModelShape) -> int:
    """Copies of a linear layer that a token goes through."""
    return min(linear.copies, shape.experts_per_token)


def _met_share(linears: list[Linear], shape: ModelShape) -> float:
    """Share of the copies' adapters that a token goes through."""
    sides = [(each.inputs + each.outputs, each) for each in linears]
    every = sum(side * each.copies for side, each in sides)
    return sum(side * met(each, shape) for side, each in sides) / every if every else 1.0


def adapted_linears(shape: ModelShape, setting: Setting) -> list[Linear]:
    """Linear layers of a decoder layer that have an adapter."""
    if setting.adapter == "none":
        return []
    return [each for each in shape.linears if is_adapted(each, setting.targets, setting.modules_to_save)]
