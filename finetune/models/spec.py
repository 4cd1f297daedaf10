"""A model as its configuration describes it: everything that is known of it before its weights are read."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from finetune.config import sections
from finetune.models import fused, loading, new_tokens, packing_support, quantization, text_part, weights
from finetune.models.end_tokens import end_tokens_of
from finetune.models.new_tokens import NewTokens


@dataclass(frozen=True)
class ModelSpec:
    """A model, and how it is to be loaded. Make one with ``read``."""

    section: sections.Model
    config: PreTrainedConfig
    """Of the model that is trained: its vocabulary has the rows of ``new_tokens``."""
    bits: int | None
    """4 or 8 to quantise the linear layers as they are read; None for the weights as they are stored."""
    attention: str
    """The name for ``attn_implementation``, or auto."""
    flat: bool
    """Rows that are not packed lie end to end too, without padding (see ``models.attention``)."""
    new_tokens: NewTokens = field(default_factory=NewTokens)

    @classmethod
    def read(
        cls,
        section: sections.Model,
        quantised: sections.Quantization,
        *,
        packing: bool,
        dtype: torch.dtype,
        chat_template: str | None = None,
        grown_rows: int | None = None,
    ) -> "ModelSpec":
        """Read the config.json, and what a chat template adds to the vocabulary.

        Args:
            packing: whether documents share rows.
            dtype: in which the model computes.
            grown_rows: of the vocabulary of a run that goes on; see ``new_tokens.grown_rows_of``.

        Raises:
            InputError: if it cannot be read, or describes no model that transformers knows.
        """
        config = loading.load_config(
            section.path, revision=section.revision, trust_remote_code=section.trust_remote_code
        )
        bits = None if quantised.bits == "none" else quantised.bits
        attention, flat = packing_support.attention_for(
            config, section.attention, packing=packing, dtype=dtype, own_code=section.trust_remote_code
        )
        new = new_tokens.of_template(section, chat_template, config, grown_rows)
        return cls(section, new.grown(config), bits, attention, flat, new)

    @property
    def text_config(self) -> PreTrainedConfig:
        """Of the language model, where the configuration holds others beside it."""
        return self.config.get_text_config()

    @property
    def stored_bits(self) -> int | None:
        """Bits that the model is published in; None for 16 or 32."""
        return quantization.stored_bits(self.config)

    @property
    def quantised_bits(self) -> int | None:
        """Bits of the frozen linear layers, once the model is loaded; None for 16 or 32."""
        return self.bits or self.stored_bits

    @property
    def keeps_of_base(self) -> bool:
        """Whether a run of all weights leaves parts of the model unchanged, which its checkpoints do not contain: an
        encoder of images, weights that the model freezes itself, or buffers."""
        frozen = any(not each.requires_grad for each in self.skeleton.parameters())
        return frozen or bool(text_part.unreached(self.skeleton)) or bool(weights.saved_buffers(self.skeleton))

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of the published weights."""
        return loading.stored_dtype(self.config)

    @property
    def saved_dtypes(self) -> dict[str, torch.dtype]:
        """By name, in which each weight is saved: in that of the published weights, or in fp32 where the model asks."""
        return {name: each.dtype for name, each in self.skeleton.named_parameters()}

    @cached_property
    def end_tokens(self) -> tuple[int, ...]:
        """Tokens at which generation stops, by generation_config.json and config.json."""
        return end_tokens_of(self.config, self.section.path, revision=self.section.revision)

    @cached_property
    def stored_config(self) -> PreTrainedConfig:
        """Of the model in its files."""
        return self.new_tokens.as_stored(self.config)

    @cached_property
    def stored_skeleton(self) -> PreTrainedModel:
        """As ``skeleton``, of the model in its files."""
        own_code = self.section.trust_remote_code
        return loading.without_weights(self.stored_config, own_code) if self.new_tokens.adds_rows else self.skeleton

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model's modules without weights, on the meta device."""
        return loading.without_weights(self.config, self.section.trust_remote_code)

    @cached_property
    def fused(self) -> dict[str, int]:
        """How many modules of each kind compute in one operation (see ``models.fused``)."""
        return fused.known_in(self.skeleton) if self.section.kernels == "auto" else {}

    @property
    def largest_parameter(self) -> int:
        """Elements of the model's largest parameter."""
        return max(parameter.numel() for parameter in self.skeleton.parameters())

    @cached_property
    def quantised_bytes(self) -> int:
        """Bytes of the quantised model; 0 where it is not quantised."""
        return quantization.quantised_bytes(self.skeleton, self.quantised_bits) if self.quantised_bits else 0
