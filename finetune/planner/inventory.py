"""Every weight of a model as a setting leaves it: its size, whether it is trained, in how many bits it is kept."""

from dataclasses import dataclass

from finetune.planner.shape import Linear, ModelShape
from finetune.planner.trained import is_adapted, ranks
from finetune.trace.setting import Setting


@dataclass(frozen=True)
class Weight:
    """A tensor of weights."""

    owner: str
    """Last name of the module that it belongs to."""
    rows: int
    columns: int = 1
    trained: bool = False
    bits: int | None = None
    """4 or 8 if it is quantised."""
    part: str = "weight"
    """weight, bias, down and up (of an adapter), magnitude (of DoRA), copy (that an adapter leaves untrained)."""

    @property
    def elements(self) -> int:
        return self.rows * self.columns

    @property
    def is_matrix(self) -> bool:
        """Decayed, and kept in 8 bits by an 8-bit optimizer: no norm, bias or magnitude."""
        return self.columns > 1

    @property
    def kept_elements(self) -> int:
        """16-bit elements that hold it, if it is quantised: one for four weights of NF4, and for two of LLM.int8."""
        return self.elements * (self.bits or 16) // 16


def of_layer(shape: ModelShape, setting: Setting) -> list[Weight]:
    """Of one decoder layer, in the order of their use."""
    whole = setting.adapter == "none"
    weights = [one for linear in shape.linears for one in _of_linear(linear, setting)]
    return weights + [_whole(norm.name, norm.elements, 1, setting, whole) for norm in shape.norms]


def of_embedding(shape: ModelShape, setting: Setting) -> list[Weight]:
    return _with_copy("embed_tokens", shape.vocabulary, shape.hidden, setting)


def of_tail(shape: ModelShape, setting: Setting) -> list[Weight]:
    """Of the last norm and the output head; a tied head is the embedding."""
    norm = [_whole("norm", shape.final_norm, 1, setting, setting.adapter == "none")]
    return norm + ([] if shape.tied else _with_copy("lm_head", shape.vocabulary, shape.hidden, setting))


def _of_linear(linear: Linear, setting: Setting) -> list[Weight]:
    whole = setting.adapter == "none" or linear.name in setting.modules_to_save
    bits = setting.bits if linear.is_module and not whole else None
    rows = linear.copies * linear.outputs
    weights = [Weight(linear.name, rows, linear.inputs, whole, bits)]
    if linear.bias:
        weights.append(Weight(linear.name, linear.outputs, 1, whole, part="bias"))
    if setting.adapter == "none" or not is_adapted(linear, setting.targets, setting.modules_to_save):
        return weights
    rank = ranks(linear, setting.rank)
    weights.append(Weight(linear.name, rank, linear.inputs, True, part="down"))
    weights.append(Weight(linear.name, linear.outputs, rank, True, part="up"))
    if setting.adapter == "dora":
        weights.append(Weight(linear.name, linear.outputs, 1, True, part="magnitude"))
    return weights


def _whole(name: str, rows: int, columns: int, setting: Setting, trained: bool) -> Weight:
    return Weight(name, rows, columns, trained or name in setting.modules_to_save)


def _with_copy(name: str, rows: int, columns: int, setting: Setting) -> list[Weight]:
    """PEFT trains a copy of a module, and keeps the module."""
    if setting.adapter == "none":
        return [Weight(name, rows, columns, True)]
    if name in setting.modules_to_save:
        return [Weight(name, rows, columns, True), Weight(name, rows, columns, part="copy")]
    return [Weight(name, rows, columns)]


def of_model(shape: ModelShape, setting: Setting) -> list[Weight]:
    """Of the whole model."""
    layer = of_layer(shape, setting)
    return [*of_embedding(shape, setting), *(layer * shape.layers), *of_tail(shape, setting)]
