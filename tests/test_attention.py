"""Packed attention: packed documents train as each alone does, and what would be silently wrong is refused."""

import json
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from finetune.data import batches
from finetune.errors import InputError
from finetune.models import attention, loading, packing_support, rotary

CPU = torch.device("cpu")
WINDOW = 5
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"use_sliding_window": True, **MIXED},
    "qwen3": {},
    "gemma3_text": MIXED,
    "smollm3": {"use_sliding_window": True, **MIXED},
    "phi3": {"sliding_window": WINDOW},
    "olmo2": {},
    "mixtral": {"num_local_experts": 2, "sliding_window": None},
}
SHARED = Path(__file__).parents[2] / "shared"
SLOW = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(autouse=True, scope="module")
def _registered() -> None:
    attention.register()
    attention.register()


def build(model_type: str, implementation: str, **changes: Any) -> Any:
    """A tiny model, the same weights for the same settings; large enough ones that what a token sees matters."""
    config = AutoConfig.for_model(model_type, **{**SMALL, **MODELS[model_type], **changes})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.15)
    return model


def draw_documents(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(3, 64, (length,), generator=generator) for length in lengths]


def loss_sum(model: Any, input_ids: torch.Tensor, labels: torch.Tensor, **arguments: Any) -> torch.Tensor:
    logits = model(input_ids=input_ids[None], use_cache=False, **arguments).logits[0]
    return F.cross_entropy(logits.float(), labels, reduction="sum", ignore_index=-100)


def shifted(document: torch.Tensor) -> torch.Tensor:
    return torch.cat([document[1:], torch.tensor([-100])])


def gradient(model: Any) -> torch.Tensor:
    flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    model.zero_grad()
    return flat


def alone(model: Any, documents: Sequence[torch.Tensor]) -> tuple[float, torch.Tensor]:
    """Loss sum and gradient of each document by itself."""
    total = 0.0
    for document in documents:
        loss = loss_sum(model, document, shifted(document))
        loss.backward()
        total += loss.item()
    return total, gradient(model)


def together(model: Any, documents: Sequence[torch.Tensor], **arguments: Any) -> tuple[float, torch.Tensor]:
    """Loss sum and gradient of all documents in one row."""
    loss = loss_sum(model, torch.cat(list(documents)), torch.cat([shifted(d) for d in documents]), **arguments)
    loss.backward()
    return loss.item(), gradient(model)


def difference(found: tuple[float, torch.Tensor], expected: tuple[float, torch.Tensor]) -> float:
    """The larger of the relative errors of loss and gradient."""
    (loss, grad), (loss_0, grad_0) = found, expected
    return max(abs(loss - loss_0) / abs(loss_0), float((grad - grad_0).norm() / grad_0.norm()))


LENGTHS = st.lists(st.integers(1, 4 * WINDOW), min_size=1, max_size=5).filter(lambda each: max(each) > 1)


@pytest.mark.parametrize("model_type", MODELS)
@given(lengths=LENGTHS)
@SLOW
def test_packed_documents_have_the_loss_and_gradients_of_each_alone(model_type: str, lengths: list[int]):
    documents = draw_documents(lengths)
    expected = alone(build(model_type, "sdpa"), documents)
    found = together(build(model_type, "packed"), documents, **batches.document_bounds(lengths, CPU))
    assert difference(found, expected) < 2e-6


@pytest.mark.parametrize("model_type", ["mistral", "gemma3_text"])
def test_eager_attention_agrees_too(model_type: str):
    lengths = [17, 3, 12]
    documents = draw_documents(lengths)
    expected = alone(build(model_type, "eager"), documents)
    found = together(build(model_type, "packed"), documents, **batches.document_bounds(lengths, CPU))
    assert difference(found, expected) < 1e-6


@pytest.mark.parametrize("model_type", MODELS)
@given(lengths=st.lists(st.integers(3, 4 * WINDOW), min_size=2, max_size=5))
@SLOW
def test_the_comparison_rejects_a_row_without_bounds(model_type: str, lengths: list[int]):
    documents = draw_documents(lengths)
    expected = alone(build(model_type, "sdpa"), documents)
    right = batches.document_bounds(lengths, CPU)
    dropped = {**batches.document_bounds([sum(lengths)], CPU), "position_ids": right["position_ids"]}
    assert difference(together(build(model_type, "packed"), documents, **dropped), expected) > 1e-3


@pytest.mark.parametrize("model_type", ["mistral", "qwen2", "gemma3_text", "smollm3", "phi3"])
@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, 100])
def test_the_comparison_rejects_a_window_of_another_size(model_type: str, window: int):
    lengths = [3 * WINDOW, 4 * WINDOW]
    documents = draw_documents(lengths)
    expected = alone(build(model_type, "sdpa"), documents)
    model = build(model_type, "packed", sliding_window=window)
    assert difference(together(model, documents, **batches.document_bounds(lengths, CPU)), expected) > 1e-3


def test_stock_attention_with_a_mask_of_ones_lets_documents_see_each_other():
    lengths = [9, 14]
    documents = draw_documents(lengths)
    model = build("llama", "sdpa")
    positions = batches.document_bounds(lengths, CPU)["position_ids"]
    mask = torch.ones(1, sum(lengths), dtype=torch.int64)
    leaking = together(model, documents, position_ids=positions, attention_mask=mask)
    assert difference(leaking, alone(model, documents)) > 1e-3


class LargestTensor(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, torch.Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize(("implementation", "row_squared"), [("packed", False), ("sdpa", True)])
def test_no_mask_of_the_row_length_squared_is_made_as_stock_attention_makes_one(implementation: str, row_squared: bool):
    lengths = [8] * 64
    bounds = batches.document_bounds(lengths, CPU)
    arguments = bounds if implementation == "packed" else {"position_ids": bounds["position_ids"]}
    with LargestTensor() as largest:
        together(build("llama", implementation), draw_documents(lengths), **arguments)
    assert (largest.elements >= sum(lengths) ** 2) == row_squared


def test_transformers_knows_the_name_and_has_no_mask_for_it():
    assert attention.PACKED in AttentionInterface().valid_keys()
    assert attention.PACKED not in AttentionMaskInterface().valid_keys()


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_activation_checkpointing_gives_the_same_gradients(model_type: str):
    lengths = [7, 18, 2]
    documents, bounds = draw_documents(lengths), batches.document_bounds(lengths, CPU)
    expected = together(build(model_type, "packed"), documents, **bounds)
    model = build(model_type, "packed").train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert difference(together(model, documents, **bounds), expected) == 0


def test_dropout_is_applied_on_the_cpu():
    model = build("llama", "packed", attention_dropout=0.5).train()
    documents, bounds = draw_documents([9, 9]), batches.document_bounds([9, 9], CPU)
    one, other = (together(model, documents, **bounds)[0] for _ in range(2))
    assert one != other


@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8))
def test_bounds_are_those_of_the_documents(lengths: list[int]):
    bounds = batches.document_bounds(lengths, CPU)
    assert bounds["position_ids"].tolist() == [[position for length in lengths for position in range(length)]]
    assert bounds["cu_seq_lens_q"].tolist() == [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    assert bounds["cu_seq_lens_q"].dtype == torch.int32
    assert bounds["cu_seq_lens_k"] is bounds["cu_seq_lens_q"]
    assert bounds["max_length_q"] == bounds["max_length_k"] == max(lengths)
    assert type(bounds["max_length_q"]) is int


@pytest.mark.parametrize("lengths", [[], [3, 0, 2]])
def test_bounds_of_empty_documents_are_refused(lengths: list[int]):
    with pytest.raises(ValueError, match="none of them empty"):
        batches.document_bounds(lengths, CPU)


def states(tokens: int, *, rows: int = 1, keys: int | None = None, dtype: Any = torch.float32) -> list[torch.Tensor]:
    """Query, key and value with 4 heads over 2 key-value heads of size 8."""
    torch.manual_seed(tokens)
    shapes = [(rows, heads, length, 8) for heads, length in ((4, tokens), (2, keys or tokens), (2, keys or tokens))]
    return [torch.randn(shape).to(dtype) for shape in shapes]


class Layer(torch.nn.Module):
    is_causal = True


def call(query_key_value: list[torch.Tensor], mask: torch.Tensor | None = None, **arguments: Any) -> torch.Tensor:
    return attention.packed_attention(Layer(), *query_key_value, mask, **arguments)[0]


def bounds_of(*lengths: int) -> dict[str, Any]:
    return batches.document_bounds(lengths, CPU)


@pytest.mark.parametrize(
    ("given", "arguments", "message"),
    [
        (states(6), {}, "without document bounds; pass"),
        (states(6), {"position_ids": torch.arange(6)[None]}, "without document bounds"),
        (states(6), {**bounds_of(4, 2), "cu_seq_lens_k": bounds_of(6)["cu_seq_lens_k"]}, "different bounds for keys"),
        (states(6), {**bounds_of(4, 2), "max_length_k": 6}, "different bounds for keys"),
        (states(6), {**bounds_of(4, 2), "mask": torch.ones(1, 6)}, "with an attention mask"),
        (states(6, rows=2), bounds_of(4, 2), "2 rows of 6 queries and 6 keys"),
        (states(1, keys=6), bounds_of(1), "1 queries and 6 keys; .* use_cache=False"),
        (states(6), bounds_of(4, 1), "bounds up to 5 for a row of 6 tokens"),
        (states(6), {**bounds_of(4, 2), "is_causal": False}, "not causal"),
        (states(6), {**bounds_of(4, 2), "softcap": 50.0}, "with softcap, which it does not support"),
        (
            states(6),
            {**bounds_of(4, 2), "s_aux": torch.zeros(4), "position_bias": torch.ones(1)},
            "position_bias, s_aux",
        ),
        (states(6), {**bounds_of(4, 2), "output_attentions": True}, "with output_attentions"),
        (states(6), {**bounds_of(4, 2), "from_the_future": 1}, "with from_the_future"),
    ],
)
def test_what_would_be_silently_wrong_is_refused(given: list[torch.Tensor], arguments: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        call(given, **arguments)


def test_a_layer_that_is_not_causal_is_refused():
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(InputError, match="not causal"):
        attention.packed_attention(layer, *states(6), None, **bounds_of(6))


def test_keywords_that_change_nothing_are_taken():
    plain = call(states(6), **bounds_of(4, 2))
    with_more = call(states(6), **bounds_of(4, 2), use_cache=True, softcap=None, s_aux=None, output_attentions=False)
    assert torch.equal(plain, with_more)


def windowed_varlen(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *bounds: Any, **arguments: Any) -> Any:
    """What ``varlen_attn`` is documented to compute, with an explicit mask over the whole row."""
    starts_q, starts_k, longest_q, longest_k = bounds
    assert torch.equal(starts_q, starts_k)
    assert longest_q == longest_k == int(starts_q.diff().max())
    total, heads, _ = query.shape
    i, j = torch.arange(total)[:, None], torch.arange(total)[None, :]
    document = torch.bucketize(torch.arange(total), starts_q[1:].long(), right=True)
    left, right = arguments["window_size"]
    seen = document[:, None] == document[None, :]
    seen &= (j <= i + right) if right >= 0 else True
    seen &= (j >= i - left) if left >= 0 else True
    repeated = [each.repeat_interleave(heads // each.shape[1], dim=1) for each in (key, value)]
    states_HTD = [each.transpose(0, 1)[None] for each in (query, *repeated)]
    output = F.scaled_dot_product_attention(*states_HTD, attn_mask=seen, scale=arguments["scale"])
    return output[0].transpose(0, 1)


@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_gpu_path_gives_the_kernel_grouped_heads_bounds_and_the_window_as_it_counts(
    window: int | None, monkeypatch: pytest.MonkeyPatch
):
    calls: list[tuple[Any, Any]] = []

    def double(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((args, kwargs))
        return windowed_varlen(*args, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", double)
    lengths = [11, 4, 2]
    bounds = batches.document_bounds(lengths, CPU)
    query, key, value = states(17, dtype=torch.bfloat16)
    found = attention._varlen(query, key, value, bounds["cu_seq_lens_q"], 11, 0.3, window, 0.0)
    expected = call([query, key, value], **bounds, scaling=0.3, sliding_window=window)
    assert found.shape == expected.shape == (1, 17, 4, 8)
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)
    ((query_THD, key_THD, value_THD, *given), kwargs) = calls[0]
    assert (query_THD.shape, key_THD.shape, value_THD.shape) == ((17, 4, 8), (17, 2, 8), (17, 2, 8))
    assert key_THD.data_ptr() == key.data_ptr()  # not repeated, not even copied
    assert given[0] is bounds["cu_seq_lens_q"]
    assert kwargs["window_size"] == ((-1, 0) if window is None else (window - 1, 0))


def test_gpu_path_computes_in_the_precision_of_autocast(monkeypatch: pytest.MonkeyPatch):
    dtypes: list[torch.dtype] = []

    def double(*args: Any, **kwargs: Any) -> torch.Tensor:
        dtypes.extend(each.dtype for each in args[:3])
        return windowed_varlen(*args, **kwargs)

    monkeypatch.setattr(attention, "varlen_attn", double)
    query, key, value = states(6)
    with torch.autocast("cpu", torch.bfloat16):
        attention._varlen(query, key, value.bfloat16(), bounds_of(4, 2)["cu_seq_lens_q"], 4, None, None, 0.0)
    assert dtypes == [torch.bfloat16] * 3


@pytest.mark.parametrize("window", [None, 4])
def test_gpu_path_goes_through_torchs_operator_and_reads_no_value_of_a_tensor(window: int | None):
    with FakeTensorMode():  # tensors without values
        query, key, value = (each.requires_grad_() for each in states(17, dtype=torch.bfloat16))
        bounds = torch.zeros(4, dtype=torch.int32)
        with pytest.raises(DataDependentOutputException):
            bounds[0].item()
        output = attention._varlen(query, key, value, bounds, 11, None, window, 0.0)
        gradients = torch.autograd.grad(output.sum(), [query, key, value])
    assert output.shape == (1, 17, 4, 8)
    assert [each.shape for each in gradients] == [query.shape, key.shape, value.shape]


def test_gpu_path_refuses_fp32_and_dropout():
    bounds = bounds_of(4, 2)["cu_seq_lens_q"]
    with pytest.raises(InputError, match=r"torch\.float32 on a GPU"):
        attention._varlen(*states(6), bounds, 4, None, None, 0.0)
    with pytest.raises(InputError, match=r"dropout 0\.1, which it cannot apply on a GPU"):
        attention._varlen(*states(6, dtype=torch.bfloat16), bounds, 4, None, None, 0.1)


@pytest.mark.parametrize("adapted", [False, True])
def test_generation_under_stock_attention_is_that_of_a_stock_model_and_packing_comes_back(adapted: bool):
    packed, stock = (build("qwen3", implementation).eval() for implementation in ("packed", "sdpa"))
    model = get_peft_model(packed, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])) if adapted else packed
    prompt = draw_documents([7])[0][None]
    settings = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    with attention.stock_attention(model):
        found = model.generate(input_ids=prompt, **settings)
    assert torch.equal(found, stock.generate(input_ids=prompt, **settings))
    with pytest.raises(InputError, match="without document bounds"):
        model(input_ids=prompt)


def test_packing_comes_back_after_an_error_and_a_stock_model_stays_as_it_is():
    model = build("llama", "packed")

    def fail_within() -> None:
        with attention.stock_attention(model):
            assert model.config._attn_implementation == "sdpa"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_within()
    assert model.config._attn_implementation == "packed"
    stock = build("llama", "eager")
    with attention.stock_attention(stock):
        assert stock.config._attn_implementation == "eager"
    assert stock.config._attn_implementation == "eager"


def problems(model_type: str, name: str = "packed", **changes: Any) -> list[str]:
    config = AutoConfig.for_model(model_type, **changes)
    return packing_support.problems(config, attention=name, dtype=torch.bfloat16, capability=(9, 0))


@pytest.mark.parametrize(
    "model_type", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "smollm3", "phi3", "olmo2", "gemma3_text", "gemma3"]
)
def test_common_models_can_be_packed(model_type: str):
    assert problems(model_type) == []
    assert problems(model_type, "flash_attention_2") == []


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("gemma2", {}, "caps attention logits"),
        ("gpt_oss", {}, "has attention sinks"),
        ("llama4_text", {}, "layers (chunked_attention) that mix"),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}, "layers (conv) that mix"),
        ("recurrent_gemma", {}, "layers that mix"),
        ("mamba", {}, "does not support attention packed"),
        ("jamba", {}, "layers that mix"),
        ("qwen3_next", {}, "layers (linear_attention) that mix"),
        ("bloom", {}, "does not support attention packed"),
        ("bert", {}, "is or has an encoder"),
        ("bart", {}, "is or has an encoder"),
        ("t5", {}, "not one of transformers' causal language models"),
        ("phimoe", {"sliding_window": 8}, "does not pass its sliding window to attention"),
        ("llama", {"head_dim": 320}, "heads of size 320"),
        ("llama", {"head_dim": 20}, "heads of size 20"),
        ("deepseek_v3", {}, "keys of size 192 and values of size 128"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop 0.1"),
    ],
)
def test_models_that_packing_would_train_wrongly_are_refused(model_type: str, changes: dict[str, Any], reason: str):
    found = problems(model_type, **changes)
    assert any(reason in problem for problem in found), found
    assert all(problem.endswith("set data.packing to false.") for problem in found)


@pytest.mark.parametrize("name", ["eager", "sdpa", "flex_attention"])
def test_attention_that_needs_a_mask_is_refused(name: str):
    (problem,) = problems("llama", name)
    assert f"With attention {name}, packed documents would attend to each other" in problem


def test_fp32_is_refused_on_a_gpu_only():
    config = AutoConfig.for_model("llama")
    (problem,) = packing_support.problems(config, attention="packed", dtype=torch.float32, capability=(9, 0))
    assert "not in fp32; set mixed_precision to bf16" in problem
    assert packing_support.problems(config, attention="packed", dtype=torch.float32, capability=None) == []


def test_gpu_before_ampere_is_refused():
    config = AutoConfig.for_model("llama")
    (problem,) = packing_support.problems(config, attention="packed", dtype=torch.float16, capability=(7, 5))
    assert "compute capability 7.5" in problem


def test_flash_attention_is_refused_without_a_gpu():
    config = AutoConfig.for_model("llama")
    (problem,) = packing_support.problems(config, attention="flash_attention_2", dtype=torch.bfloat16, capability=None)
    assert "flash_attention_2 needs a GPU, but none was found; choose packed" in problem


@pytest.mark.skipif(not (SHARED / "configs").is_dir(), reason="needs the configurations of released models")
def test_released_models_can_be_packed_but_for_gemma_2():
    refused, checked = set(), 0
    for path in sorted((SHARED / "configs").glob("*.json")):
        keys = json.loads(path.read_text())
        if "model_type" in keys:
            checked += 1
            config = AutoConfig.for_model(**keys)
            if packing_support.problems(config, attention="packed", dtype=torch.bfloat16, capability=(9, 0)):
                refused.add(path.stem)
    assert checked >= 28
    assert refused == {"gemma-2-2b"}


EVERY = SMALL | {
    "is_decoder": True,
    "moe_intermediate_size": 16,
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group"), 1),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "q_lora_rank"), 8),
    "num_experts_per_tok": 2,
    "v_head_dim": 16,
}
"""For the configuration of any model."""


def small_model(kind: type[Any]) -> Any:
    """None where these sizes are not enough to build one, or make none that is small."""
    try:
        config = kind(**EVERY)
        with torch.device("meta"):
            size = sum(each.numel() for each in AutoModelForCausalLM.from_config(config).parameters())
        if size > 3e6:
            return None
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
        with torch.no_grad():
            model(input_ids=torch.ones(1, 3, dtype=torch.int64), use_cache=False)
    except Exception:  # as many kinds as there are models
        return None
    return model.eval()


def test_every_model_that_is_said_to_keep_documents_apart_does_so():
    lengths, checked = [5, 3], 0
    ids = torch.arange(3, 11)[None]
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = small_model(kind)
        if model is None or packing_support.problems(
            model.config, attention="packed", dtype=torch.float32, capability=None
        ):
            continue
        checked += 1
        with torch.no_grad():
            alone = torch.cat([model(input_ids=each, use_cache=False).logits for each in ids.split(lengths, 1)], 1)
            model.set_attn_implementation("packed")
            flat = model(input_ids=ids, use_cache=False, **batches.document_bounds(lengths, CPU)).logits
        assert (flat - alone).abs().max() < 1e-5 * alone.abs().max(), kind.__name__
    assert checked > 70


def test_every_model_that_is_said_to_rotate_as_llama_does_so(monkeypatch: pytest.MonkeyPatch):
    """To the bit; and with the same angles in both halves of a head, which Liger's kernel takes for granted."""
    checked, are_alike, apply = 0, list[bool](), rotary._Rotated.apply

    def watched(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        are_alike.extend(torch.equal(*each.chunk(2, -1)) for each in (cos, sin))
        return apply(q, k, cos, sin)

    monkeypatch.setattr(rotary._Rotated, "apply", watched)
    ids = torch.arange(3, 11)[None]
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        model = small_model(kind)
        rotations = {} if model is None else {each: rotary.rotating(each) for each in model.modules()}
        if not any(rotations.values()):
            continue
        checked += 1
        with torch.no_grad():
            expected = model(input_ids=ids, use_cache=False).logits
            for module, forward in rotations.items():
                if forward is not None:
                    module.forward = types.MethodType(forward, module)
            assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected), kind.__name__
    assert checked > 60
    assert all(are_alike)
    assert len(are_alike) > 3 * checked


def test_a_model_that_may_run_code_of_its_own_is_not_taken_to_keep_documents_apart():
    known: dict[str, Any] = {"packing": False, "dtype": torch.float32}
    config = AutoConfig.for_model("llama", **SMALL)
    assert packing_support.attention_for(config, "auto", own_code=True, **known) == ("packed", True)
    config.auto_map = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    assert packing_support.attention_for(config, "auto", own_code=False, **known) == ("packed", True)
    assert packing_support.attention_for(config, "auto", own_code=True, **known) == ("auto", False)
    assert packing_support.attention_for(config, "sdpa", own_code=False, **known) == ("sdpa", False)


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("window", [None, 1, 64])
@pytest.mark.parametrize("heads", [8, 2])
def test_gpu_kernel_agrees_with_the_cpu_and_nothing_waits_for_the_gpu(window: int | None, heads: int):
    lengths = [300, 1, 77, 130]
    gpu = torch.device("cuda")
    shapes = [(1, each, sum(lengths), 64) for each in (8, heads, heads)]
    on_cpu = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    on_gpu = [each.detach().to(gpu).requires_grad_() for each in on_cpu]
    weights = torch.randn(1, sum(lengths), 8, 64).bfloat16()
    weights_on_gpu = weights.to(gpu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = call(on_gpu, **batches.document_bounds(lengths, gpu), sliding_window=window)
        found.backward(weights_on_gpu)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = call([each.float() for each in on_cpu], **batches.document_bounds(lengths, CPU), sliding_window=window)
    expected.backward(weights.float())
    torch.testing.assert_close(found.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    for one, other in zip(on_gpu, on_cpu):
        exact = other.grad.float()
        assert (one.grad.cpu().float() - exact).norm() < 2e-2 * exact.norm() + 1e-2  # a window of 1 has no gradient


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("model_type", ["llama", "qwen3", "mistral", "gemma3_text"])
def test_packed_documents_train_on_a_gpu_under_autocast_as_each_alone_does_in_fp32(model_type: str):
    lengths = [40, 3, 25]
    documents = draw_documents(lengths)
    expected = alone(build(model_type, "sdpa"), documents)
    model = build(model_type, "packed").cuda()
    row, labels = torch.cat(documents).cuda(), torch.cat([shifted(each) for each in documents]).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = loss_sum(model, row, labels, **batches.document_bounds(lengths, torch.device("cuda")))
    loss.backward()
    assert difference((loss.item(), gradient(model).cpu()), expected) < 5e-2


@pytest.mark.parametrize(("model_type", "expected"), [("gemma2", "eager"), ("llama", None)])
def test_a_cap_of_scores_is_computed_by_eager_attention_and_not_left_out(
    model_type: str, expected: str | None, monkeypatch: pytest.MonkeyPatch
):
    """Versions of transformers chose otherwise, in runs and wherever else a model is loaded."""
    asked: list[Any] = []
    from_config = AutoModelForCausalLM.from_config

    def noted(config: Any, *, attn_implementation: str | None, **how: Any) -> Any:
        asked.append(attn_implementation)
        return from_config(config, attn_implementation=attn_implementation, **how)

    monkeypatch.setattr(AutoModelForCausalLM, "from_config", noted)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 512, "head_dim": 16}
    config = AutoConfig.for_model(model_type, num_attention_heads=4, num_key_value_heads=2, **sizes)
    how: Any = {"revision": None, "trust_remote_code": False, "seed": 0, "bits": None, "device": torch.device("cpu")}
    loading.load_model("m", config, attention="auto", dtype=torch.float32, random_weights=True, **how)
    assert asked == [expected]


def test_attention_without_a_cap_is_refused_where_scores_have_one():
    config = AutoConfig.for_model("gemma2")
    assert "sdpa has no cap" in loading.attention_problems(config, "sdpa", False)[0]
    assert loading.attention_problems(config, "eager", False) == []
