"""What is kept out of a step, and what looks into it: garbage is collected between steps, which a profiler counts."""

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from torch.profiler import profile, schedule

from finetune.data.encoding_workers import rarely_collecting_garbage
from finetune.output.output_folder import PROFILE

UNLIKE_OTHERS = 2
"""Steps of a launch before those that are profiled: they allocate memory, make kernels and read libraries."""


@contextmanager
def between_steps(profiled_steps: int, folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Collect garbage at the same point of a step on all processes, so that none waits for another one's collection,
    and among what steps made alone; and profile some steps, where a number is given (see ``profiled``).

    Yields:
        To be called after each step.
    """
    with ExitStack() as stack:
        stack.enter_context(rarely_collecting_garbage())
        calls: list[Callable[[], object]] = [gc.collect]
        if profiled_steps:
            calls.append(stack.enter_context(profiled(profiled_steps, folder, say)))

        def step_is_over() -> None:
            for call in calls:
                call()

        yield step_is_over


@contextmanager
def profiled(steps: int, folder: Path, say: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Write a trace of so many steps of this process, once it has made ``UNLIKE_OTHERS``; of fewer if it ends before.

    Args:
        folder: in which ``PROFILE`` is written.
        say: called once it is written, or if it cannot be, or if there was nothing to write. Training goes on.

    Yields:
        To be called after each step.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints where it starts and stops
    file, told = folder / PROFILE, list[str]()

    def write(found: profile) -> None:
        if found.step_num <= UNLIKE_OTHERS:
            return
        count = found.step_num - UNLIKE_OTHERS
        try:
            found.export_chrome_trace(str(file))
            line = f"a profile of {count} step{'s' if count > 1 else ''} is in {file}; open it in Perfetto"
        except OSError as error:
            line = f"log.profile: {file} cannot be written ({error.strerror or error}), so there is no profile"
            with suppress(OSError):  # else what there is of it stays
                file.unlink()
        told.append(line)
        say(line)

    plan = schedule(skip_first=UNLIKE_OTHERS - 1, wait=0, warmup=1, active=steps, repeat=1)
    with profile(schedule=plan, on_trace_ready=write, acc_events=True) as profiler:
        yield profiler.step
    if not told:
        say(f"log.profile: this launch made no more than {UNLIKE_OTHERS} steps, which are not profiled")
