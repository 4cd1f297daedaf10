"""What the processes of a group compute of rows that they share, and how far it is from what one has of whole rows."""

import importlib
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import scenarios
import torch
import torch.distributed as dist
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

from finetune.config.compatibility import heads_problems
from finetune.data import batches
from finetune.distributed import Strategy, shared
from finetune.errors import InputError
from finetune.models import attention, context_attention
from finetune.models.attention import packed_attention
from finetune.models.context_attention import Bounds, ContextShare
from finetune.models.packing_support import heads_of, why_not_spread
from finetune.training import pretraining

CPU = torch.device("cpu")


def _join() -> None:
    if not dist.is_initialized():
        dist.init_process_group("gloo")


Refused = tuple[int, dict[str, str], dict[str, Any], str]
"""Processes, environment of the launch, changes of the configuration, and words of the refusal."""


@dataclass(frozen=True)
class Case:
    """Attention to a row of documents."""

    lengths: tuple[int, ...]
    how: Any
    heads: int = 4
    key_heads: int = 2
    window: int | None = None
    value_size: int = 4
    dtype: torch.dtype = torch.float64


def _whole(case: Case) -> list[torch.Tensor]:
    """Query, key and value of a row, and the gradient of its outputs."""
    draw, tokens = torch.Generator().manual_seed(hash(case.lengths) % 1000), sum(case.lengths)
    shapes = [(1, case.heads, tokens, 8), (1, case.key_heads, tokens, 8), (1, case.key_heads, tokens, case.value_size)]
    shapes.append((1, tokens, case.heads, case.value_size))
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(case.dtype) for shape in shapes]


def _with_gradients(tensors: list[torch.Tensor], window: int | None, **known: Any) -> list[torch.Tensor]:
    *inputs, of_output = (each.clone() for each in tensors)
    for each in inputs:
        each.requires_grad_()
    found, _ = packed_attention(torch.nn.Module(), *inputs, None, is_causal=True, sliding_window=window, **known)
    return [found, *torch.autograd.grad(found, inputs, of_output)]


def errors_of(cases: list[Case], mutation: str = "") -> tuple[int, list[list[float]]]:
    """The size of the group, and of each case the errors of the outputs and gradients of this process, relative to the
    largest of the row, or to 1: of output, query, key and value."""
    _join()
    with mutated(mutation):
        return dist.get_world_size(), [_errors(case) for case in cases]


def _errors(case: Case) -> list[float]:
    tensors = _whole(case)
    expected = _with_gradients(tensors, case.window, **batches.document_bounds(case.lengths, CPU))
    share = ContextShare.of(case.lengths, dist.group.WORLD, case.how, CPU)
    own = [each[:, :, share.own] for each in tensors[:3]] + [tensors[3][:, share.own]]
    found = _with_gradients(own, case.window, context_share=share)
    expected_here = [expected[0][:, share.own], *(each[:, :, share.own] for each in expected[1:])]
    return [  # with a window of 1, the gradients of queries and keys are zero
        float((one - other).abs().max() / whole.abs().max().clamp(min=1.0))
        for one, other, whole in zip(found, expected_here, expected, strict=True)
    ]


def _own_keys_only(self: Any, query: Any, key: Any, value: Any, part: Any) -> torch.Tensor:
    found: torch.Tensor = part(query, key, value, self.query_bounds, self.query_bounds)
    return found


def _own_gradients_only(ctx: Any, of_seen: torch.Tensor) -> Any:
    """What ``_GatheredContext.backward`` would be without the sum over processes."""
    of_whole = of_seen.new_zeros(dist.get_world_size(ctx.group) * ctx.positions, *of_seen.shape[1:])
    of_whole.index_add_(0, torch.cat(ctx.keys), of_seen)
    return of_whole.view(-1, ctx.positions, *of_seen.shape[1:])[dist.get_rank(ctx.group)], None, None


@contextmanager
def mutated(mutation: str) -> Iterator[None]:
    if mutation == "own keys only":
        with mock.patch.object(ContextShare, "attend", _own_keys_only):
            yield
    elif mutation == "own gradients only":
        with mock.patch.object(context_attention._GatheredContext, "backward", staticmethod(_own_gradients_only)):
            yield
    else:
        yield


def shares_of(lengths: list[int], strategy: Strategy) -> dict[str, Any]:
    """What this process has of a micro-batch of texts of so many tokens, and what there is."""
    _join()
    start, rows = 3, []
    for number, length in enumerate(lengths):
        tokens = np.arange(start, start + length, dtype=np.int32)
        spans = [(1, length)] if length > 1 else []
        rows.append(pretraining.MeasuredRow(tokens, spans, str(number), origin=number % 2, trained_bytes=length))
        start += length
    strategy = Strategy(**{**vars(strategy), "rank": dist.get_rank()})
    places = [rows[:1], rows[1:]] if len(rows) > 1 else [rows]

    def collate(places: Any, device: torch.device) -> pretraining.CorpusBatch:
        return pretraining.collate(places, device, flat=True, sources=2)

    whole, part = collate(places, CPU), shared(collate, strategy)(places, CPU)
    share = part.inputs["context_share"]
    return {
        "own": share.own.tolist(),
        "tokens": part.inputs["input_ids"][0].tolist(),
        "positions": part.inputs["position_ids"][0].tolist(),
        "next": part.next_tokens[0].tolist(),
        "origins": part.origin_BT[0].tolist(),
        "bytes": part.bytes_S.tolist(),
        "documents": [end - start for start, end in itertools.pairwise(share.whole.on_host)],
        "whole": {
            "tokens": whole.inputs["input_ids"][0].tolist(),
            "positions": whole.inputs["position_ids"][0].tolist(),
            "next": whole.next_tokens[0].tolist(),
            "origins": whole.origin_BT[0].tolist(),
            "bytes": whole.bytes_S.tolist(),
        },
    }


def full(lengths: list[int], processes: int) -> tuple[int, ...]:
    """With a last document that makes them a multiple of twice the processes."""
    missing = -sum(lengths) % (2 * processes)
    assert math.gcd(2 * processes, sum(lengths) + missing) == 2 * processes
    return tuple(lengths + [missing] * (missing > 0))


def errors_of_models(kinds: list[type] | None, how: Any, mutation: str = "") -> dict[str, float]:
    """Of each kind of model that may share rows, how far the logits and gradients of the group are from those of the
    whole row.

    Args:
        kinds: of configurations; None for all that transformers knows.
    """
    from test_attention import small_model

    _join()
    attention.register()
    lengths, found = [9, 5, 2], dict[str, float]()
    ids = torch.arange(3, 3 + sum(lengths))[None]
    bounds = batches.document_bounds(lengths, CPU)
    for kind in kinds or MODEL_FOR_CAUSAL_LM_MAPPING:
        model = small_model(kind)
        if model is None or why_not_spread(model.config, dtype=torch.float32, capability=None):
            continue
        if how == "exchange" and heads_problems("ulysses", dist.get_world_size(), *heads_of(model.config)):
            continue
        model.set_attn_implementation("packed")
        whole = model(input_ids=ids, use_cache=False, **bounds).logits
        weight = torch.randn(whole.shape, generator=torch.Generator().manual_seed(0))
        (whole * weight).sum().backward()
        expected = _taken_gradients(model)
        share = ContextShare.of(lengths, dist.group.WORLD, how, CPU)
        own = {"input_ids": ids[:, share.own], "position_ids": bounds["position_ids"][:, share.own]}
        with mutated(mutation):
            logits = model(**own, use_cache=False, context_share=share).logits
            (logits * weight[:, share.own]).sum().backward()
        gradients = _taken_gradients(model)
        dist.all_reduce(gradients)
        of_logits = (logits - whole[:, share.own]).abs().max() / whole.abs().max()
        of_gradients = (gradients - expected).norm() / expected.norm()
        found[kind.__name__] = float(max(of_logits, of_gradients))
    return found


def _taken_gradients(model: Any) -> torch.Tensor:
    flat = [torch.zeros_like(each) if each.grad is None else each.grad for each in model.parameters()]
    model.zero_grad()
    return torch.cat([each.flatten() for each in flat])


def refused_by_a_model(config: Any) -> str:
    """What a model says that is given its share of a row."""
    _join()
    attention.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed")
    share = ContextShare.of([5, 3], dist.group.WORLD, "gather", CPU)
    positions = torch.arange(len(share.own))[None]
    try:
        model(input_ids=positions + 3, position_ids=positions, use_cache=False, context_share=share)
    except InputError as error:
        return str(error)
    return ""


def heaviest_of_a_run(config: Any, environment: dict[str, str]) -> list[tuple[int, int]]:
    """Train; returns positions of the micro-batch that memory is checked with, here and of the whole rows."""
    from finetune.run import session
    from recipes import sft

    os.environ.update(environment)
    seen, check = list[tuple[int, int]](), session.check_memory

    def watched(*args: Any, **known: Any) -> None:
        _, inputs = args[4]()
        seen.append((inputs["input_ids"].shape[1], inputs["context_share"].whole.on_host[-1]))
        check(*args, **known)

    with mock.patch.object(session, "check_memory", watched):
        sft.main(config)
    return seen


def fails_for_memory(config: Any) -> str:
    """What a run says whose heaviest micro-batch does not fit."""
    from recipes import sft

    def too_large(*args: Any) -> Any:
        raise torch.OutOfMemoryError("Tried to allocate 1 GiB")

    with mock.patch.object(ContextShare, "attend", too_large):
        try:
            sft.main(config)
        except InputError as error:
            return str(error)
    return ""


def refused_by_a_run(recipe: str, values: dict[str, Any], environment: dict[str, str]) -> str:
    """What a recipe says that is launched with other settings; nothing where it trains."""
    module = importlib.import_module(recipe)
    os.environ.update(environment)
    try:
        module.main(module.Config.model_validate(values))
    except InputError as error:
        return str(error)
    return ""


def assert_refused(ranks: Any, case: Refused, model: Path, rows: Path, folder: Path, strategy: str) -> None:
    """A launch and settings are refused in every process, before anything is written."""
    processes, environment, changes, sentence = case
    changes = {"train__steps": 1, "train__global_batch_size": 12, "train__micro_batch_size": 1} | changes
    config = scenarios.configuration(model, rows, folder, **changes)
    asked = refused_by_a_run, "recipes.sft", config.model_dump(), environment
    for said in ranks(processes).run(*asked, strategy=strategy):
        assert sentence in said
    assert not folder.exists()


def part_of(tensors: list[torch.Tensor], queries: list[int], seen: list[int], window: int | None) -> torch.Tensor:
    """Attention of some queries to what they see, by the kernel of the tensors' device."""
    bounds = [Bounds.of(each, tensors[0].device) for each in (queries, seen)]
    query, key, value = tensors
    return attention._part(query, key, value, *bounds, scaling=None, sliding_window=window, dropout=0.0)
