"""Memory of DeepSpeed ZeRO on one process: what it holds between steps, and what comes and goes in one.

Read off DeepSpeed 0.19.8 (``runtime/``: S12 is ``zero/stage_1_and_2.py``, S3 ``zero/stage3.py``, BF16
``bf16_optimizer.py``, ENG ``engine.py``; numbers are lines), as configured by ``distributed/setup.py``: gradients
accumulate and travel in fp32, the optimizer is ours, gradients are reduced in buckets of ``BUCKET_ELEMENTS``.
``tests/test_plan_zero.py`` holds it against real processes. Four optimizers hide behind three stages:

=============================================  ===================================================================
stage, precision, weights                      optimizer (ENG:2294)
=============================================  ===================================================================
1, bf16, fp32 masters                          ``BF16_Optimizer``: fp32 gradients of the whole model, always there
1, otherwise                                   ``DeepSpeedZeroOptimizer``: whole gradients while they accumulate
2                                              ``DeepSpeedZeroOptimizer``: fp32 share of the gradients, freed by the
                                               step; a bucket in every backward pass
3                                              ``DeepSpeedZeroOptimizer_Stage3``: share and bucket always there
=============================================  ===================================================================

Not covered: the optimizer's own workspace (a fused step has none; others work on a flat share as on one tensor, see
``ZeroBytes.largest_flat``), communication buffers of NCCL, and fp16 beyond what the source says (it needs a GPU).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

BUCKET_ELEMENTS = 50_000_000
"""``reduce_bucket_size`` (``zero/config.py``), as ``distributed.setup`` sets it."""
ALLREDUCE_ELEMENTS = 500_000_000
"""The same of stage 1 in bf16, which cannot be set (``MEMORY_OPT_ALLREDUCE_SIZE``, ENG:3073)."""
PERSISTENT_ELEMENTS = 100_000
"""Weights of at most so many elements stay gathered (``param_persistence_threshold``)."""
SUB_GROUP_ELEMENTS = 1_000_000_000
"""ZeRO-3 steps over so many elements of a share at a time (``sub_group_size``)."""
SWAP_BUFFERS = {"weights": 5, "optimizer": 4}
"""Pinned buffers of the NVMe swap (``zero/offload_config.py``)."""


@dataclass(frozen=True)
class ZeroBytes:
    """Bytes on the GPU of one process, after its first step."""

    weights: int
    """In the precision of computation, trained and frozen: whole under stages 1 and 2 (flat, S12:389), a share under 3
    (S3:913)."""
    persistent: int
    """Small weights that stage 3 keeps whole beside their shares (``zero/parameter_offload.py``:317)."""
    masters: int
    optimizer_state: int
    gradients: int
    """Held between steps: whole in fp32 (BF16:186), or a share (S3:791), or none."""
    bucket: int
    """Of stage 3, held always (S3:782)."""
    accumulated: int
    """More than ``gradients``, while later micro-batches are computed: 16-bit gradients that are zeroed, not freed
    (BF16:500), or the share of stage 2 (S12:1268). Also there at the end of every backward pass."""
    backward_bucket: int
    """Of stages 1 and 2, from the first gradient of a backward pass to its end (S12:3256)."""
    reduction: int
    """Copies in the largest reduction of gradients, at most, beside the buckets."""
    step: int
    """Copies in the optimizer's step, without the optimizer's own, beside what the backward pass has left."""
    largest_flat: int
    """Elements of the largest tensor that the optimizer steps on: a share of one of its groups."""
    host: int = 0
    """Pinned or plain host memory of an offload, as asked for; pinned memory may be rounded up to powers of two."""
    disk: int = 0

    @property
    def between_steps(self) -> int:
        """Held while the first micro-batch of a step begins."""
        held = (self.weights, self.persistent, self.masters, self.optimizer_state, self.gradients, self.bucket)
        return sum(held)

    @property
    def backward_end(self) -> int:
        """Held when a backward pass has ended."""
        return self.between_steps + self.accumulated

    @property
    def reduction_peak(self) -> int:
        """Beside the activations that are left, when gradients are reduced."""
        return self.backward_end + self.backward_bucket + self.reduction

    @property
    def step_peak(self) -> int:
        """In the optimizer's step, without its workspace."""
        return self.backward_end + self.step


def flat_shares(groups: Sequence[Sequence[int]], processes: int) -> list[int]:
    """Elements of one process's share of each group, flat and padded to two elements a process (S12:441, BF16:149)."""
    return [-(-sum(group) // (2 * processes)) * 2 for group in groups]


def tensor_shares(sizes: Sequence[int], processes: int) -> int:
    """Elements of one process's shares of tensors that are each split and padded by themselves, as under stage 3."""
    return sum(-(-size // processes) for size in sizes)


def zero_bytes(
    *,
    stage: int,
    processes: int,
    trained: Sequence[Sequence[int]],
    frozen: Sequence[int] = (),
    precision: str = "bf16",
    weights: str = "fp32_master",
    state_bytes: float | None = None,
    offload: Literal["none", "host", "disk"] = "none",
    bucket_elements: int = BUCKET_ELEMENTS,
) -> ZeroBytes:
    """The bytes of one process; shares are equal but for padding, which is counted.

    Args:
        stage: 1, 2 or 3.
        trained: elements of every trained weight, by the optimizer's groups (matrices, then norms and biases).
        frozen: elements of every frozen weight, in the precision of computation.
        precision: bf16, fp16, or ``no`` for fp32.
        weights: ``fp32_master`` or ``bf16``.
        state_bytes: of the optimizer for a trained element; AdamW's two moments by default.
        offload: where masters, optimizer state and gradients lie, and the weights' shares (stage 3 alone).
        bucket_elements: ``reduce_bucket_size``.

    Raises:
        ValueError: for a stage or an offload that there is not.
    """
    if stage not in (1, 2, 3):
        raise ValueError(f"ZeRO has no stage {stage}; take 1, 2 or 3.")
    if offload != "none" and stage != 3:
        raise ValueError(f"Offload is configured for stage 3, not for stage {stage}; take offload none.")
    trained = [group for group in trained if group]
    width = 4 if precision == "no" else 2
    kept = 2 if weights == "bf16" and precision == "bf16" else 4  # masters, accumulated gradients
    state = 2 * kept if state_bytes is None else state_bytes
    if stage == 3:
        return _stage_3(processes, trained, frozen, width, kept, state, offload, bucket_elements)
    shares = flat_shares(trained, processes)
    whole, share = sum(shares) * processes, sum(shares)
    largest, total = max(map(max, trained)), sum(map(sum, trained))
    bucket = min(total, bucket_elements)
    overflowing = width * largest if total > bucket_elements else 0  # the gradient for which the bucket has no room
    held = {
        "weights": width * (whole + sum(frozen)),
        "persistent": 0,
        "masters": kept * share,
        "optimizer_state": round(state * share),
        "bucket": 0,
        "largest_flat": max(shares),
    }
    if stage == 1 and precision == "bf16" and kept == 4:
        return ZeroBytes(
            **held,
            gradients=4 * whole,
            accumulated=width * total,
            backward_bucket=0,
            # cast to be accumulated (BF16:525), or the groups joined to be reduced (ENG:3073)
            reduction=max(4 * largest, 4 * _concatenated([n * processes for n in shares])),
            step=0,
        )
    straddled = kept * _straddled(trained, shares)
    if stage == 1:
        # whole gradients (in fp32 beside fp16 weights, S12:1234) and the bucket stay until the last micro-batch, after
        # which those of the own share are left (S12:2184); they are joined to be the gradient of the masters (S12:3118)
        accumulated = kept * (total + bucket_elements)
        return ZeroBytes(
            **held,
            gradients=0,
            accumulated=accumulated,
            backward_bucket=0,
            reduction=straddled + (kept + 4 * (kept == 2)) * bucket + overflowing,
            step=max(0, straddled + kept * max(shares) - accumulated),
        )
    # the gradient of a weight larger than the bucket passes it by, and stays where its share is held (S12:2265)
    oversized = largest if largest > bucket_elements else 0
    passed_by = max(_straddled(trained, shares, above=bucket_elements), oversized)
    per_element = width + (4 if width != 4 else 0)  # slices joined (S12:2367), then cast to fp32 to travel (S12:2377)
    is_compact = kept == 4 and width == 2  # (S12:1259)
    return ZeroBytes(
        **held,
        gradients=0,
        accumulated=kept * share if is_compact else straddled,
        backward_bucket=width * bucket_elements,
        # what a micro-batch adds to the gradients of the last ones is made before it is added (S12:1041)
        reduction=per_element * max(bucket, oversized)
        + overflowing
        + width * passed_by
        + (0 if is_compact else straddled),
        # the norm of each piece is taken in fp64 (S12:2676)
        step=8 * _largest_piece(trained, shares) if is_compact else kept * max(shares),
    )


def _stage_3(
    processes: int,
    trained: Sequence[Sequence[int]],
    frozen: Sequence[int],
    width: int,
    kept: int,
    state: float,
    offload: str,
    bucket_elements: int,
) -> ZeroBytes:
    everything = [size for group in trained for size in group]
    share = tensor_shares(everything, processes)
    frozen_share = tensor_shares(frozen, processes)
    persistent = width * sum(size for size in [*everything, *frozen] if size <= PERSISTENT_ELEMENTS)
    largest, flat = max(everything), max(map(max, (_sub_groups(group, processes) for group in trained)))
    # joined to be scattered (coalesced_collectives.py:107); a weight larger than the bucket is cast beside its gradient
    bucket = 4 * min(sum(everything), bucket_elements)
    reduction = max(bucket, (10 if width == 2 else 8) * largest if largest > bucket_elements else 0)
    # small weights are released first (S3:2879); then infinities are looked for (S3:3012), norms are taken in fp64
    # (S3:2464), and the share of a group is copied to be the gradient of its masters (S3:2683)
    step = max((kept + 1) * share, kept * flat, 8 * -(-largest // processes)) - persistent
    terms = {
        "weights": width * (share + frozen_share),
        "masters": kept * share,
        "optimizer_state": round(state * share),
        "gradients": kept * share,
    }
    on_gpu = dict.fromkeys(terms, 0) if offload != "none" else terms
    # gradients lie in host memory twice: accumulated (S3:791), and as those of the masters (S3:1337)
    host = sum(terms.values()) + kept * share if offload == "host" else 0
    if offload == "disk":
        # gradients accumulate in host memory (S3:791); the rest passes through buffers as large as the largest
        # (utils of swap_tensor/optimizer_utils.py:185; the size of the weights' is set by distributed/setup.py)
        host = kept * share + width * SWAP_BUFFERS["weights"] * max([*everything, *frozen])
        host += kept * SWAP_BUFFERS["optimizer"] * flat
    return ZeroBytes(
        **on_gpu,
        persistent=persistent,
        bucket=4 * bucket_elements,
        accumulated=0,
        backward_bucket=0,
        reduction=reduction,
        step=max(step, 0) if offload == "none" else 0,
        largest_flat=flat,
        host=host,
        disk=sum(terms.values()) if offload == "disk" else 0,
    )


def _concatenated(sizes: Sequence[int]) -> int:
    """Elements copied when flat gradients are joined until they are more than the bucket; one alone is not copied."""
    largest, joined = 0, []
    for size in sizes:
        joined.append(size)
        if sum(joined) > ALLREDUCE_ELEMENTS:
            largest, joined = max(largest, sum(joined) if len(joined) > 1 else 0), []
    return max(largest, sum(joined) if len(joined) > 1 else 0)


def _straddled(groups: Sequence[Sequence[int]], shares: Sequence[int], above: int = 0) -> int:
    """Elements of all weights of more than so many that lie at least in part in one process's share, where they are
    most (S12:2142)."""
    totals: Counter[int] = Counter()
    for group, share in zip(groups, shares, strict=True):
        start = 0
        for size in group:
            for process in range(start // share, (start + size - 1) // share + 1):
                totals[process] += size if size > above else 0
            start += size
    return max(totals.values())


def _largest_piece(groups: Sequence[Sequence[int]], shares: Sequence[int]) -> int:
    """Elements of the largest part of a weight in one share, on the process where it is largest."""
    largest = 0
    for group, share in zip(groups, shares, strict=True):
        start = 0
        for size in group:
            end = start + size
            while start < end:
                cut = min(end, (start // share + 1) * share)
                largest, start = max(largest, cut - start), cut
    return largest


def _sub_groups(group: Sequence[int], processes: int) -> list[int]:
    """Elements of the shares that stage 3 steps on, one after the other (S3:1210)."""
    parts = [0]
    for size in group:
        if parts[-1] >= SUB_GROUP_ELEMENTS:
            parts.append(0)
        parts[-1] += -(-size // processes)
    return parts
