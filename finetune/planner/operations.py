"""What PyTorch's operations and transformers' small modules do, on tensors without values.

Operation for operation, so that what is kept for backward, in which dtype and until when, follows from the program;
``tests/test_plan_tape.py`` holds it against what PyTorch really saves. Linear layers are in ``plan.linear``, attention
is in ``plan.attending``.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from finetune.planner.tape import Backward, Enough, Frame, Memory, Node, Parameter, Storage, Tensor


@dataclass(frozen=True)
class Numerics:
    """In which widths (bytes of an element) a model computes."""

    compute: int
    """Of matrix products: 2 for bf16 and fp16, else 4."""
    trained: int
    """Of trained parameters as the modules see them: 4 for fp32 masters."""
    frozen: int
    autocast: bool
    """Matrix products cast their operands to ``compute``."""
    on_gpu: bool = True
    """CUDA's kernels; else those that stand in for them on a CPU."""


class Operations:
    """Operations on micro-batches."""

    def __init__(self, memory: Memory, numerics: Numerics, *, rows: int, row_tokens: int, packed: bool = False) -> None:
        """
        Args:
            row_tokens: positions of each row.
            packed: the rows are documents in one row.
        """
        self.memory, self.numerics = memory, numerics
        self.rows, self.row_tokens, self.packed = rows, row_tokens, packed
        self.tokens = rows * row_tokens
        self.casts: dict[object, Tensor] = {}
        """Autocast's copies of trained weights, which it keeps until it ends."""
        self.pinned: dict[int, int] = {}
        """Bytes of what stays until the graph goes, by storage."""
        self.frame: Frame | None = None
        """Of what is checkpointed, in its first pass."""
        self.again: Frame | None = None
        """In its second."""

    def new(self, elements: float, width: int) -> Tensor:
        return Tensor(Storage(self.memory, elements * width), int(elements), width)

    def made(
        self,
        output: Tensor | Callable[[], Tensor],
        inputs: Sequence[Tensor],
        backward: Backward,
        saved: Sequence[Tensor] = (),
        pinned: Sequence[Tensor] = (),
    ) -> Tensor:
        """The output of an operation, through which gradients pass to those inputs that want one.

        Args:
            output: or what makes it, once the inputs are saved.
        """
        wants = any(tensor.node for tensor in inputs)
        kept = [tensor.storage for tensor in saved]
        if wants and self.again is not None:
            self.again.give(list(kept))
        output = output if isinstance(output, Tensor) else output()
        if not wants:
            return output
        if self.again is not None:
            output.node = Node(inputs, kept, _nowhere)
            return output
        output.node = Node(inputs, [] if self.frame else kept, backward, [tensor.storage for tensor in pinned])
        self.pinned.update({id(tensor.storage): tensor.storage.size for tensor in pinned})
        if self.frame is not None:
            self.frame.add(output.node, saves=bool(kept))
        return output

    def like(self, x: Tensor) -> Callable[[], Tensor]:
        """Makes tensors of the size of x, without holding it; of the kind that is made now."""
        elements, width, memory, kind = x.elements, x.width, self.memory, self.memory.kind
        return lambda: Tensor(Storage(memory, elements * width, kind), elements, width)

    def wanted(self, x: Tensor) -> Callable[[], Tensor | None]:
        """Makes gradients of x, or none if it wants none."""
        return self.like(x) if x.node else lambda: None

    def cast(self, x: Tensor, width: int) -> Tensor:
        """To another dtype; the same tensor if it has it."""
        if x.width == width:
            return x
        back = self.like(x)
        return self.made(self.new(x.elements, width), [x], lambda arrived: [back()])

    def cast_operand(self, x: Tensor) -> Tensor:
        """To the dtype of matrix products, where autocast does so."""
        if not self.numerics.autocast:
            return x
        if not isinstance(x, Parameter) or x.node is None:
            return self.cast(x, self.numerics.compute)
        if x not in self.casts:
            self.casts[x] = self.cast(x, self.numerics.compute)
        return self.casts[x]

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        width = max(a.width, b.width)
        widths, news = (a.width, b.width), (self.like(a), self.like(b))

        def backward(arrived: list[Tensor]) -> list[Tensor | None]:
            arrived[0].storage.shared = widths[0] == widths[1]
            return [arrived[0] if w == width else new() for w, new in zip(widths, news, strict=True)]

        return self.made(self.new(a.elements, width), [a, b], backward)

    def scale(self, x: Tensor) -> Tensor:
        """Times a plain number, or over it."""
        back = self.like(x)
        return self.made(self.new(x.elements, x.width), [x], lambda arrived: [back()])

    def clone(self, x: Tensor) -> Tensor:
        return self.made(self.new(x.elements, x.width), [x], lambda arrived: arrived)

    def multiply(self, a: Tensor, b: Tensor) -> Tensor:
        """Elementwise; b may be smaller, and its gradient is summed over what it was stretched by."""
        elements, width = a.elements, max(a.width, b.width)
        of_a, of_b, stretched = (a.node is not None), (b.node is not None), b.elements != elements
        narrow_a, narrow_b, for_a, for_b = a.width != width, b.width != width, self.like(a), self.like(b)
        new = self.new

        def backward(arrived: list[Tensor]) -> list[Tensor | None]:
            one = new(elements, width) if of_a else None
            two = new(elements, width) if of_b else None
            if of_b and stretched:
                two = for_b()
            if of_a and narrow_a:
                one = for_a()
            if of_b and narrow_b and not stretched:
                two = for_b()
            return [one, two]

        saved = ([b] if of_a else []) + ([a] if of_b else [])
        return self.made(lambda: new(elements, width), [a, b], backward, saved=saved)

    def norm(self, x: Tensor, weight: Parameter, *, weighs_in_fp32: bool, adds_one: bool) -> Tensor:
        """RMSNorm (arXiv:1910.07467) over rows, in fp32: ``weight * (x * rsqrt(mean(x ** 2) + epsilon))``.

        Args:
            weight: as long as a row.
            weighs_in_fp32: the result is brought to the dtype of x last, else before it is multiplied by the weight.
            adds_one: the weight is brought to fp32, and is one less than what it stands for.
        """
        x32 = self.cast(x, 4)
        new, elements, rows = self.new, x.elements, x.elements // weight.elements

        def through_power(arrived: list[Tensor]) -> list[Tensor | None]:
            power = new(elements, 4)
            doubled = new(elements, 4)
            gradient = new(elements, 4)
            del power, doubled
            return [gradient]

        square = self.made(new(elements, 4), [x32], through_power, saved=[x32])
        mean = self.made(new(rows, 4), [square], lambda arrived: [new(elements, 4)])
        del square
        root = new(rows, 4)
        root = self.made(root, [mean], lambda arrived: [new(rows, 4)], saved=[root])
        del mean
        normal = self.multiply(x32, root)
        del x32, root
        if not weighs_in_fp32:
            normal = self.cast(normal, x.width)
            return self.multiply(normal, weight)
        factor: Tensor = weight
        if adds_one:
            factor = self.cast(weight, 4)
            factor = self.made(new(factor.elements, 4), [factor], lambda arrived: arrived)
        return self.cast(self.multiply(normal, factor), x.width)

    def rotate(self, x: Tensor, cosine: Tensor, sine: Tensor, *, joins: bool, keeps_width: bool) -> Tensor:
        """Rotary position embedding (arXiv:2104.09864): ``x * cos + rotate_half(x) * sin``.

        Args:
            joins: with what is not rotated of each head, which may be nothing.
            keeps_width: it is brought back to the dtype of x.
        """
        width = x.width
        plain = self.multiply(x, cosine)
        whole = self.like(x)
        negative = self.made(self.new(x.elements // 2, x.width), [x], lambda arrived: [whole()])
        turned = self.made(self.new(x.elements, x.width), [negative, x], lambda arrived: [*arrived, whole()])
        del negative
        turned = self.multiply(turned, sine)
        rotated = self.add(plain, turned)
        del plain, turned
        if joins:
            return self.clone(rotated)
        return self.cast(rotated, width) if keeps_width else rotated

    def squash(self, x: Tensor) -> Tensor:
        """``tanh(x / cap) * cap``: keeps what tanh returns."""
        x = self.scale(x)
        back = self.like(x)
        output = back()
        return self.scale(self.made(output, [x], lambda arrived: [back()], saved=[output]))

    def soften(self, x: Tensor) -> Tensor:
        """Softmax in fp32: keeps what it returns."""
        x = self.cast(x, 4)
        back = self.like(x)
        output = back()
        return self.made(output, [x], lambda arrived: [back()], saved=[output])

    def activate(self, x: Tensor) -> Tensor:
        """SiLU, GELU: keeps its input."""
        back = self.like(x)
        return self.made(self.new(x.elements, x.width), [x], lambda arrived: [back()], saved=[x])

    def dropout(self, x: Tensor) -> Tensor:
        mask = self.new(x.elements, 1 if self.numerics.on_gpu else x.width)
        back = self.wanted(x)
        return self.made(self.new(x.elements, x.width), [x], lambda arrived: [back()], saved=[mask])

    def view(self, x: Tensor, elements: int) -> Tensor:
        """A part of a tensor, in the same storage."""
        whole = self.like(x)
        return self.made(Tensor(x.storage, elements, x.width), [x], lambda arrived: [whole()])

    def checkpoint(self, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Keep the input alone, and run the function again when backward asks for more (arXiv:1604.06174).

        Gradients take the way of the first pass; the graph of the second goes at once. The input is kept until they
        have passed.
        """
        given = Tensor(x.storage, x.elements, x.width, x.node and Node([], [], _nowhere))

        def recompute(frame: Frame) -> None:
            casts, self.casts, self.again = self.casts, {}, frame
            with suppress(Enough):
                function(given)
            self.casts, self.again = casts, None

        self.frame = Frame(recompute, x.storage)
        output = function(x)
        self.frame = None
        return output


def _nowhere(arrived: list[Tensor]) -> list[Tensor | None]:
    return []
