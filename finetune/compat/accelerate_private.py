"""Private names of Accelerate. Read in 1.15."""

from typing import Any

from accelerate.state import AcceleratorState, GradientState


def launch_defaults(args: Any) -> tuple[Any, Any, bool]:
    """The flags of ``accelerate launch`` completed from its launch file, that file, and whether it sets the precision.

    Goes when Accelerate has a public function from a launch file to the environment of its processes.
    """
    from accelerate.commands import launch

    checked: tuple[Any, Any, bool] = launch._validate_launch_command(args)
    return checked


def forget_state() -> None:
    """Forget the settings of an earlier run in this process. Goes when ``Accelerator.free_memory`` does it."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
