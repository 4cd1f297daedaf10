"""What FSDP2 allocates around each of its units: a decoder layer, the embedding, the norm and head at the end.

Read off PyTorch 2.13's ``fully_shard`` and Accelerate 1.15's use of it: in forward the flat result of an all-gather
lives until that of the next unit has been copied out; in backward the next unit's is fetched ahead, and the fp32 input
of a reduce-scatter lives until the next one.
"""

from collections.abc import Sequence

from finetune.planner.tape import Memory, Parameter, Storage


class Exchange:
    """What the units of a model share: results and inputs of collectives that are not yet let go of."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.gathered: Storage | None = None
        self.reducing: Storage | None = None
        self.replicated: list[Storage] = []
        """Gradients that were reduced over replicas, which PyTorch keeps to the end of the pass."""

    def finish(self) -> None:
        """Let go of them."""
        self.gathered = self.reducing = None
        self.replicated.clear()


class ShardedUnit:
    """Modules whose weights are gathered and whose gradients are reduced together."""

    casts_inputs = True
    """``MixedPrecisionPolicy.cast_forward_inputs``, which Accelerate leaves on."""

    def __init__(
        self,
        exchange: Exchange,
        parameters: Sequence[Parameter],
        *,
        gather_bytes: int,
        share_elements: int,
        shards: int,
        master: int,
        replicas: int,
        stays_gathered: bool = False,
        keeps_gradients: bool = True,
    ) -> None:
        """
        Args:
            parameters: those that are trained.
            gather_bytes: of all weights, whole, with the padding of their shares.
            share_elements: of a process's share of what is trained, with its padding.
            master: bytes of an element that this process keeps.
            replicas: groups of processes that each hold all shares.
            stays_gathered: from its forward until its backward.
            keeps_gradients: their shares stay on the GPU.
        """
        self.exchange, self.memory, self.parameters = exchange, exchange.memory, list(parameters)
        self.master, self.stays_gathered, self.keeps_gradients = master, stays_gathered, keeps_gradients
        self.replicas = replicas
        self.gather_bytes, self.share_elements, self.shards = gather_bytes, share_elements, shards
        self.held: Storage | None = None
        self.fetched: Storage | None = None
        self.gradients: Storage | None = None
        self.before: ShardedUnit | None = None
        """The unit whose backward comes next."""
        self.waits = False

    def fetch(self) -> None:
        """All-gather into a flat buffer, if that is not under way."""
        if self.held is None and self.fetched is None:
            self.fetched = Storage(self.memory, self.gather_bytes, "gathered")

    def before_forward(self) -> None:
        if self.held is not None:
            return
        self.fetch()
        if not self.waits:  # in a checkpointed layer's second run the unit is in its backward
            self.exchange.gathered = None
        self.held = Storage(self.memory, self.gather_bytes, "gathered")
        if not self.waits:
            self.exchange.gathered = self.fetched
        self.fetched = None

    def after_forward(self) -> None:
        if not self.stays_gathered:
            self.held = None

    def before_backward(self) -> None:
        self.waits = True
        self.exchange.gathered = None
        if self.held is None:
            self.fetch()
            self.held = Storage(self.memory, self.gather_bytes, "gathered")
            self.fetched = None
        if self.before is not None:
            self.before.fetch()

    def after_backward(self) -> None:
        """Once its gradients are there; again at the end of the pass, for those that no gradient reached."""
        self.waits, self.held, self.fetched = False, None, None
        if all(parameter.grad is None for parameter in self.parameters):
            return
        self.exchange.reducing = None
        self.exchange.reducing = Storage(self.memory, 4 * self.shards * self.share_elements, "gathered")
        last = [self.parameters[-1].grad]  # which a variable of ``foreach_reduce`` still refers to
        for parameter in self.parameters:
            parameter.grad = None
        reduced = Storage(self.memory, 4 * self.share_elements, "gradients")
        last.clear()
        if self.replicas > 1:
            self.exchange.replicated.append(reduced)
        if self.master != 4:
            reduced = Storage(self.memory, self.master * self.share_elements, "gradients")
        if self.gradients is None and self.keeps_gradients:
            self.gradients = reduced
