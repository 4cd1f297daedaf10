"""How the GPUs of a job are arranged: tensor, pipeline, context, data and expert parallel factors.

Ranks are numbered as Megatron-LM does by default (order tp-cp-ep-dp-pp): tensor parallel neighbours stand side by side,
then context, then data; pipeline stages are farthest apart, so that the traffic that is largest has the shortest way.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from finetune.planner.shape import ModelShape


@dataclass(frozen=True)
class Layout:
    """Factors whose product is the number of GPUs."""

    tensor: int
    """GPUs that share every matrix."""
    pipeline: int
    """GPUs among which the layers are dealt."""
    context: int
    """GPUs that share every row's positions."""
    data: int
    """Replicas, each with rows of its own."""
    expert: int = 1
    """GPUs, of those that differ in data or context, among which the experts of a layer are dealt."""
    virtual_stages: int = 1
    """Chunks of layers that each GPU of a pipeline has (the interleaved schedule)."""
    sequence_parallel: bool = True
    """Norms and residuals are split over the tensor parallel GPUs, too (arXiv:2205.05198)."""
    shards_optimizer: bool = True
    """Optimizer state is split over data and context (Megatron's distributed optimizer)."""

    @property
    def gpus(self) -> int:
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def name(self) -> str:
        """As in "tensor 1, pipeline 6, data 8", factors of one left out but for the first two."""
        parts = [f"tensor {self.tensor}", f"pipeline {self.pipeline}"]
        for word, factor in (("virtual", self.virtual_stages), ("context", self.context), ("expert", self.expert)):
            parts += [f"{word} {factor}"] if factor > 1 else []
        return ", ".join([*parts, f"data {self.data}"])


@dataclass(frozen=True)
class Job:
    """What an optimizer step is made of."""

    row_tokens: int
    global_batch_rows: int
    micro_batch_rows: int = 1
    """Rows that a replica computes at a time."""
    activation_checkpointing: Literal["none", "full"] = "none"
    """full: keep only the input of each layer, and compute the layer again in backward."""

    @property
    def tokens_per_step(self) -> int:
        return self.row_tokens * self.global_batch_rows

    def micro_batches(self, layout: Layout) -> int:
        """Of one replica in a step."""
        return self.global_batch_rows // (layout.data * self.micro_batch_rows)

    def tokens(self, layout: Layout) -> int:
        """Of a micro-batch on one GPU."""
        return self.micro_batch_rows * self.row_tokens // layout.context


def why_not(layout: Layout, shape: "ModelShape", job: Job) -> list[str]:
    """Reasons why a layout is impossible, each a sentence; empty where it is possible."""
    t, p, c, e = layout.tensor, layout.pipeline, layout.context, layout.expert
    chunks = p * layout.virtual_stages
    rows = layout.data * job.micro_batch_rows
    pieces = (2 * c if c > 1 else 1) * (t if layout.sequence_parallel else 1)
    rules = (
        (shape.heads % t, f"{shape.heads} attention heads cannot be divided among {t} GPUs"),
        (shape.kv_heads % t, f"{shape.kv_heads} key-value heads cannot be divided among {t} GPUs"),
        (shape.intermediate % t, f"an intermediate size of {shape.intermediate} cannot be divided among {t} GPUs"),
        (shape.layers < chunks, f"{shape.layers} layers are too few for {chunks} stages"),
        (layout.virtual_stages > 1 and p == 1, "virtual stages need a pipeline"),
        (shape.experts % e, f"{shape.experts} experts cannot be divided among {e} GPUs"),
        (layout.data * c % e, f"data {layout.data} times context {c} is not a multiple of expert {e}"),
        (job.row_tokens % pieces, f"rows of {job.row_tokens} tokens cannot be cut into {pieces} equal pieces"),
        (
            job.global_batch_rows % rows,
            f"{job.global_batch_rows} rows per step are not a multiple of {layout.data} replicas times "
            f"{job.micro_batch_rows} rows per micro-batch",
        ),
        (
            layout.virtual_stages > 1 and job.micro_batches(layout) % p,
            f"with virtual stages the micro-batches must be a multiple of {p}",
        ),
    )
    return [f"{sentence[0].upper()}{sentence[1:]}." for broken, sentence in rules if broken]


def factors(number: int) -> list[int]:
    """Divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def layouts(
    gpus: int,
    shape: "ModelShape",
    job: Job,
    *,
    tensor: int | None = None,
    pipeline: int | None = None,
    context: int | None = None,
    expert: int | None = None,
    virtual_stages: int = 1,
    shards_optimizer: bool = True,
) -> list[tuple[Layout, list[str]]]:
    """Every arrangement of a number of GPUs, each with the sentences that make it impossible.

    A factor that is given is kept to. Without one, context parallelism is tried up to 8, and experts only for
    models that have them.
    """
    found = []
    for t in factors(gpus):
        for p in factors(gpus // t):
            for c in factors(gpus // (t * p)):
                data = gpus // (t * p * c)
                asked = all(want is None or want == has for want, has in ((tensor, t), (pipeline, p), (context, c)))
                if not asked or (context is None and c > 8):
                    continue
                shared = [expert] if expert is not None else factors(data * c) if shape.experts > 1 else [1]
                for e in shared:
                    if expert is None and (shape.experts % e or e > shape.experts):
                        continue
                    stages = virtual_stages if p > 1 else 1
                    layout = Layout(t, p, c, data, e, stages, t > 1, shards_optimizer)
                    found.append((layout, why_not(layout, shape, job)))
    return found
