"""Internals of bitsandbytes, none of which it documents. Read in 0.50."""

from typing import Any


def fake_tensor_changes(fake_class: type) -> list[tuple[Any, str, Any]]:
    """What bitsandbytes needs on fake tensors.

    Args:
        fake_class: of a fake 4-bit weight, in the place of its own ``Params4bit``.
    """
    import bitsandbytes.functional as quantisation
    import bitsandbytes.nn.modules as quantised_modules

    def find_quant_state(module: Any) -> None:
        """Give the weight its quantisation constants back, without making a parameter of its own class of it, which
        loses that the tensor is fake (until its classes are made with ``torch.Tensor.as_subclass``)."""
        if "quant_state" not in vars(module.weight):
            module.weight.quant_state = module.quant_state
            module.weight.__class__ = fake_class

    return [
        (quantisation, "name2qmap", {}),  # its constants, made once: fake ones must not stay (until it keeps none)
        (quantised_modules, "fix_4bit_weight_quant_state_from_module", find_quant_state),
    ]
