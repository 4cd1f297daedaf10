"""The figures of each optimizer step; on a GPU read one step late, so that no step waits for it."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from accelerate import Accelerator

from finetune.errors import RunStopped
from finetune.models.flops import TrainingFlops
from finetune.training.loss import Figure
from finetune.units import GIB

MOST_SKIPPED_IN_A_ROW = 40
"""A loss scale of 2^24 has been halved to nothing by then."""


class Moment:
    """When a device got to here: a GPU does so later than the host, which does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self.reached: Any = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None
        if self.reached is not None:
            self.reached.record()
        self.seconds = time.perf_counter()

    def wait(self) -> None:
        """Until the device got there."""
        if self.reached is not None:
            self.reached.synchronize()

    def since(self, earlier: "Moment") -> float:
        """Seconds from an earlier moment of the same device to this one; waits for it."""
        if self.reached is None:
            return self.seconds - earlier.seconds
        self.wait()
        milliseconds: float = earlier.reached.elapsed_time(self.reached)
        return milliseconds / 1e3


class Meter:
    """Collects a step's tensors and turns them into numbers when the next step is under way."""

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        shares: Sequence[int],
        flops: TrainingFlops,
        peak_flops: float | None,
        max_bad_steps: int,
        last_checkpoint: Callable[[], str],
        counters: dict[str, int] | None = None,
    ) -> None:
        """
        Args:
            shares: which share of the rows each process computes; those that compute rows together have the same.
            flops: of the model, for each token.
            peak_flops: one GPU's FLOP/s, where they are known.
            max_bad_steps: steps in a row whose loss or gradient is not finite, before the run stops.
            last_checkpoint: tells in a clause where the run can be taken up again.
            counters: of the run that is resumed.
        """
        self.accelerator = accelerator
        self.flops = flops
        self.peak_flops = peak_flops
        self.max_bad_steps, self.last_checkpoint = max_bad_steps, last_checkpoint
        self.shares = shares
        self.unread: list[tuple[dict[str, Any], torch.Tensor, Moment]] = []
        kinds = ("skipped_steps", "skipped_in_a_row", "bad_steps", "bad_in_a_row", "left_out_steps")
        self.counters = dict.fromkeys(kinds, 0) | (counters or {})
        """Steps that were left out so far: because fp16 overflowed, because a figure was not finite, and for either."""
        self.clock = Moment(accelerator.device)
        self.speeds: list[float] = []
        self.peak_memory_gib = 0.0

    def measured(self) -> dict[str, float | None]:
        """Of the steps so far: the peak, and the median of the tokens per second; None for what is not known."""
        return {
            "peak_memory_gib": self.peak_memory_gib or None,
            "tokens_per_second": statistics.median(self.speeds) if self.speeds else None,
        }

    def update(
        self,
        *,
        step: int,
        rows: Callable[[], list[str]],
        losses: torch.Tensor,
        figures: Mapping[str, Figure],
        divide_by: int,
        tokens: int,
        row_tokens: int,
        total_tokens: int,
        grad_norm: float,
        learning_rate: float,
        skipped: bool,
    ) -> list[dict[str, Any]]:
        """Take up a step; return the metrics that can be read without waiting (on a GPU those of the step before).

        Args:
            rows: tells ``file:line`` of each place of the step, all processes, with an empty text where the run has no
                row left; asked only if the step is bad.
            losses: sum of the losses of each of this process's micro-batches, on its device.
            figures: of this process, by their names.
            divide_by: what the mean loss of the step is of: its trained tokens, for example.
            tokens: trained tokens of the step, all processes.
            row_tokens: tokens of the rows, trained or not; the useful work that ``mfu`` is of.
            total_tokens: positions that the step processed, all processes, padding included.
            grad_norm: global norm before clipping.
            skipped: the optimizer left the step out because fp16 gradients overflowed.

        Raises:
            RunStopped: if too many steps in a row were left out.
        """
        skipped = skipped and self.accelerator.mixed_precision == "fp16"  # elsewhere nothing may overflow
        self.counters["skipped_steps"] += skipped
        self.counters["skipped_in_a_row"] = self.counters["skipped_in_a_row"] + 1 if skipped else 0
        if self.counters["skipped_in_a_row"] > MOST_SKIPPED_IN_A_ROW:
            raise RunStopped(
                f"step {step}: the gradients of {self.counters['skipped_in_a_row']} steps in a row overflowed in fp16, "
                f"so the model is not learning and the run stops; {self.last_checkpoint()}. Launch with "
                "--mixed_precision bf16 or no, or lower train.learning_rate."
            )
        known = {
            "step": step,
            "rows": rows,
            "figures": list(figures),
            "divide_by": divide_by,
            "tokens": tokens,
            "row_tokens": row_tokens,
            "total_tokens": total_tokens,
            "learning_rate": learning_rate,
            "skipped": skipped,
            "skipped_steps": self.counters["skipped_steps"],
        }
        device = self.accelerator.device
        memory = torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0
        others: list[torch.Tensor | float] = [*chain(*figures.values()), grad_norm, memory]
        rest = [
            other.to(device).float().reshape(1)
            if isinstance(other, torch.Tensor)
            else torch.full((1,), float(other), device=device)  # a copy would wait for the GPU
            for other in others
        ]
        mine = torch.cat([losses.float(), *rest])
        finished = self.flush()
        gathered = self.accelerator.gather(mine[None]).to("cpu", non_blocking=True)
        self.unread.append((known, gathered, Moment(device)))
        return finished if device.type == "cuda" else self.flush()

    def flush(self) -> list[dict[str, Any]]:
        """Wait for the steps that were not read yet, and return their metrics."""
        finished = [self._read(*each) for each in self.unread]
        self.unread = []
        return finished

    def _read(self, known: dict[str, Any], gathered: torch.Tensor, end: Moment) -> dict[str, Any]:
        end.wait()  # for the numbers too, which were copied before it
        # processes x (micro-batches, totals and divisors of the figures, gradient norm, memory)
        numbers = gathered.double()
        grad_norm, peak_memory_gib = numbers[0, -2].item(), numbers[:, -1].max().item()
        losses, figures = numbers[:, :-2].tensor_split([numbers.shape[1] - 2 - 2 * len(known["figures"])], dim=1)
        # each of those that compute rows together knows a part of their loss
        shares = torch.tensor(self.shares)
        losses = losses.new_zeros(len(set(self.shares)), losses.shape[1]).index_add(0, shares, losses)
        bad = self._count_if_bad(known, losses, grad_norm)
        self.counters["left_out_steps"] += bool(bad) or known["skipped"]
        seconds, self.clock = end.since(self.clock), end
        metrics = {
            "step": known["step"],
            "loss": None if bad else losses.sum().item() / known["divide_by"],
            "tokens": known["tokens"],
            "total_tokens": known["total_tokens"],
            "grad_norm": grad_norm if math.isfinite(grad_norm) else None,
            "learning_rate": known["learning_rate"],
            "step_seconds": seconds,
            "tokens_per_second": known["total_tokens"] / seconds,
        }
        if self.peak_flops is not None:
            flops = self.flops.of(known["row_tokens"], known["tokens"]) / self.accelerator.num_processes
            metrics["mfu"] = flops / seconds / self.peak_flops
        self.speeds.append(known["total_tokens"] / seconds)
        if peak_memory_gib > 0:
            metrics["peak_memory_gib"] = self.peak_memory_gib = peak_memory_gib
        if self.accelerator.mixed_precision == "fp16":
            metrics["skipped_steps"] = known["skipped_steps"]
        totals, divisors = figures.sum(0).view(-1, 2).T
        return metrics | (bad or dict(zip(known["figures"], (totals / divisors).tolist(), strict=True)))

    def _count_if_bad(self, known: dict[str, Any], losses: torch.Tensor, grad_norm: float) -> dict[str, Any]:
        """What to report of a step that was left out for its figures; empty for a good one.

        Args:
            losses: of shape (shares of the rows, micro-batches), in the order in which a global batch is dealt out.

        Raises:
            RunStopped: after ``max_bad_steps`` of them in a row.
        """
        bad = [i for i, loss in enumerate(losses.T.flatten().tolist()) if not math.isfinite(loss)]
        if not bad and (math.isfinite(grad_norm) or known["skipped"]):
            self.counters["bad_in_a_row"] = 0
            return {}
        self.counters["bad_steps"] += 1
        self.counters["bad_in_a_row"] += 1
        of_step = known["rows"]()
        size = len(of_step) // losses.numel()
        rows = [row for i in bad for row in of_step[i * size : (i + 1) * size]] if bad else of_step
        rows = [row for row in rows if row]  # a run may end within a global batch
        figure = "loss" if bad else "gradient norm"
        if self.counters["bad_in_a_row"] >= self.max_bad_steps:
            steps = f"{self.max_bad_steps} steps in a row" if self.max_bad_steps > 1 else "the step"
            named = ", ".join(rows[:8]) + (", ..." if len(rows) > 8 else "")
            raise RunStopped(
                f"step {known['step']}: the {figure} is not finite; {steps} left the weights as they were, so the run "
                f"stops, and {self.last_checkpoint()}. The rows are {named}. Look at them, or lower "
                "train.learning_rate; fp16 also overflows where bf16 does not."
            )
        return {"not_finite": figure, "bad_steps": self.counters["bad_steps"], "rows": rows}

    def result_problem(self, steps: int) -> str | None:
        """Why a run has no result, as a sentence: it ended with the weights that it began with.

        Args:
            steps: of the whole run, all of which were read.
        """
        if self.counters["left_out_steps"] < steps:
            return None
        which = "The only step" if steps == 1 else f"None of the {steps:,} steps"
        return (
            f"{which} of this run changed {'no' if steps == 1 else 'a'} weight, because losses or gradients were not "
            "finite. There is no result, and no final/ was written. Look at the rows that metrics.jsonl names and at "
            "the model's weights, or lower train.learning_rate; fp16 also overflows where bf16 does not."
        )

    def restart_clock(self) -> None:
        """Leave out of the next step's time what was done between the steps."""
        self.clock = Moment(self.accelerator.device)
