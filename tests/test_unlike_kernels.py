"""A model whose modules compute more than the kernels that would take their place is refused, with the way out."""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_fused import FAMILIES, SMALL
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from finetune.errors import InputError
from finetune.models.loading import without_weights
from finetune.planner.asked import asked
from finetune.planner.written import Options
from finetune.trace.anatomy import unlike_kernels


class Limited(LlamaMLP):
    limit = 10.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = self.act_fn(self.gate_proj(x).clamp(max=self.limit)) * self.up_proj(x)
        found: torch.Tensor = self.down_proj(product)
        return found


class Dropping(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(super().forward(x), 0.5, self.training)


class Asserting(LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        assert hidden_states.shape[-1] == 32
        return super().forward(hidden_states)


@pytest.mark.parametrize("kind", [Limited, Dropping, Asserting])
def test_module_that_limits_drops_or_cannot_be_asked_is_named(kind: Any) -> None:
    module = kind(32) if kind is Asserting else kind(AutoConfig.for_model("llama", **SMALL))
    assert unlike_kernels(torch.nn.ModuleList([module])) == kind.__name__


def test_limit_of_one_layer_is_found_beside_others_without() -> None:
    config = AutoConfig.for_model("llama", **SMALL)
    layers = [Limited(config), Limited(config)]
    layers[1].limit = float("inf")
    assert unlike_kernels(torch.nn.ModuleList(layers[1:])) is None
    assert unlike_kernels(torch.nn.ModuleList(layers)) == "Limited"


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_the_kernels_compute_are_not(family: str) -> None:
    config = AutoConfig.for_model(family, **SMALL)
    assert unlike_kernels(without_weights(config, trust_remote_code=False)) is None


def test_plan_of_seed_oss_whose_mlp_drops_numbers_names_the_key(tmp_path: Path) -> None:
    config = AutoConfig.for_model("seed_oss", **SMALL, max_position_embeddings=2048, residual_dropout=0.1)
    config.save_pretrained(tmp_path)
    flags = [f"--model.path={tmp_path}", "--data.train=x.jsonl", f"--train.output_dir={tmp_path / 'out'}"]
    options = Options(gpus="1xH100")
    with pytest.raises(InputError, match=r"SeedOssMLP cannot be replaced.*Set model\.kernels to plain"):
        asked(flags, options)
    question = asked([*flags, "--model.kernels=plain"], options).question
    question.model.tracer.__exit__(None, None, None)
