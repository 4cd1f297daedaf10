"""What a model is made of: matrices and norms under the names that transformers gives them, and how many there are."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Linear:
    """A linear layer of one decoder layer, or a matrix that takes the place of one."""

    name: str
    """Last name as in transformers: q_proj, gate_up_proj, experts' gate_up_proj, gate (a mixture's router)."""
    inputs: int
    outputs: int
    bias: bool = False
    copies: int = 1
    """Experts, whose matrices are one parameter of three dimensions."""
    is_module: bool = True
    """A ``torch.nn.Linear``: what bitsandbytes quantises, and what an adapter can be asked for by name. Routers and
    experts are parameters of modules of their own since transformers 5."""
    inside: str = ""
    """Modules of the decoder layer in which it lies: self_attn, mlp, mlp.experts."""

    @property
    def matrix_parameters(self) -> int:
        """Elements of the matrices of all copies."""
        return self.copies * self.inputs * self.outputs

    @property
    def parameters(self) -> int:
        """Elements of matrices and biases of all copies."""
        return self.matrix_parameters + self.copies * self.outputs * self.bias

    @property
    def path(self) -> str:
        """Name inside the decoder layer; of an expert's or router's matrix, that of its module and parameter."""
        return ".".join(part for part in (self.inside, self.name) if part)


@dataclass(frozen=True)
class Norm:
    """A norm of one decoder layer."""

    name: str
    elements: int
    """Of its weight, which is the length of what it normalises."""
    rows_per_token: int = 1
    """Vectors that it normalises for each token: as many as there are heads where each head has its own."""
    inside: str = ""
    """Modules of the decoder layer in which it lies: self_attn, or none."""

    @property
    def path(self) -> str:
        """Name inside the decoder layer."""
        return ".".join(part for part in (self.inside, self.name) if part)


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a causal language model whose decoder layers are alike."""

    model_type: str
    layers: int
    hidden: int
    intermediate: int
    """Of the MLP; of one expert where there are several."""
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    """Embedding and output head are one matrix."""
    linears: tuple[Linear, ...]
    """Of one decoder layer, in the order of their use, a mixture's router included."""
    norms: tuple[Norm, ...]
    """Of one decoder layer."""
    final_norm: int
    """Elements of the norm before the output head."""
    positions: int | None = None
    """The longest row that the model is made for."""
    activation: str = "silu"
    """Of the MLP: silu, gelu_pytorch_tanh."""
    sliding_window: int | None = None
    """Positions that the windowed layers attend to."""
    windowed_layers: int = 0
    """Layers that attend within the window; the others to all positions before."""
    experts: int = 1
    experts_per_token: int = 1
    attention_softcap: bool = False
    """Attention scores are squashed (Gemma 2), which sdpa cannot do."""
    logits_softcap: bool = False
    """Logits are squashed (Gemma 2)."""
    stored_dtype_bytes: int = 4
    """Bytes of a weight's element as published."""
    published_bits: int | None = None
    """4 or 8 where the published linear layers are quantised by bitsandbytes."""
    not_counted: tuple[str, ...] = ()
    """Parts of the model that this shape leaves out: the vision tower of a multimodal model."""

    @property
    def q(self) -> int:
        """Elements of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def kv(self) -> int:
        """Elements of all key heads of a token, and of all value heads."""
        return self.kv_heads * self.head_dim

    @property
    def embedding_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """Of the output head, 0 where it is the embedding."""
        return 0 if self.tied else self.embedding_parameters

    @property
    def layer_parameters(self) -> int:
        """Of one decoder layer."""
        return sum(linear.parameters for linear in self.linears) + sum(norm.elements for norm in self.norms)

    @property
    def layer_linear_parameters(self) -> int:
        """Elements of the matrices of one decoder layer, without biases."""
        return sum(linear.matrix_parameters for linear in self.linears)

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        outside = self.embedding_parameters + self.head_parameters + self.final_norm
        return self.layers * self.layer_parameters + outside

    @property
    def active_parameters(self) -> int:
        """Those that a token meets: of the experts, those chosen for it."""
        chosen = [replace(m, copies=self.experts_per_token) if m.copies > 1 else m for m in self.linears]
        return replace(self, linears=tuple(chosen)).parameters

    @property
    def quantised_linear_parameters(self) -> int:
        """Elements that bitsandbytes quantises: of all linear layers but the output head.

        Experts and routers are no linear layers to it, and stay in 16 bits.
        """
        return self.layers * sum(linear.matrix_parameters for linear in self.linears if linear.is_module)
