"""Which settings are possible: whatever a run would refuse by its model and its launch alone, is not."""

from finetune.config.compatibility import (
    averaging_problems,
    bf16_weights_problems,
    context_problems,
    expert_problems,
    fp8_problems,
    heads_problems,
    pipeline_problems,
    reference_problems,
    refusal,
    router_problems,
    scaling_problems,
    split_problems,
    spread_problems,
    stage_problems,
)
from finetune.config.refusals import recomputation_problems
from finetune.config.strategy_names import EXPERTS
from finetune.planner.model import Model
from finetune.trace.placement import world_sizes_problem
from finetune.trace.setting import Setting


def why_not(model: Model, setting: Setting) -> str | None:
    """Why a setting is impossible, as a sentence; None if it is possible."""
    if model.published_bits and setting.bits != model.published_bits:
        return (
            f"The model is published in {model.published_bits} bits, which stay frozen; train an adapter on them, or "
            "use its 16-bit version."
        )
    return (
        next(iter(_expert_problems(model, setting)), None)
        or world_sizes_problem(setting.strategy, setting.world_size, setting.sizes)
        or next(iter(_tensor_problems(model, setting)), None)
        or next(iter(_pipeline_problems(model, setting)), None)
        or next(iter(_router_problems(model, setting)), None)
        or refusal(setting.cell)
        or next(iter(scaling_problems(setting.strategy, precision=setting.precision)), None)
        or next(iter(bf16_weights_problems(setting.cell, weights=setting.weights, precision=setting.precision)), None)
        or next(iter(reference_problems(setting.strategy, setting.reference)), None)
        or next(iter(recomputation_problems(setting.recomputed_layers, model.anatomy.layers)), None)
        or next(iter(_context_problems(model, setting)), None)
        or next(iter(_fp8_problems(setting)), None)
        or next(iter(averaging_problems(setting.strategy, averages=setting.averages)), None)
    )


def _expert_problems(model: Model, setting: Setting) -> list[str]:
    """Of a strategy that shares experts even where these GPUs cannot: the model may have none."""
    shares = EXPERTS in setting.sizes
    processes = max(2, setting.experts) if shares else 1
    return expert_problems("this model", model.anatomy.experts, processes)


def _pipeline_problems(model: Model, setting: Setting) -> list[str]:
    if setting.stages == 1:
        return []
    known = "this model", len(model.anatomy.costs), setting.stages, setting.parts
    return stage_problems(setting.strategy, *known) + pipeline_problems(
        setting.strategy,
        parts=setting.parts,
        schedule=setting.pipeline_schedule,
        embedding_noise=setting.embedding_noise,
        paired=setting.paired,
    )


def _router_problems(model: Model, setting: Setting) -> list[str]:
    asked, own = setting.router_aux_loss_coef, model.anatomy.router_coefficient
    return router_problems(
        setting.strategy,
        "this model",
        coefficient=own if asked is None else asked,
        balances=model.anatomy.balances,
        paired=setting.paired,
    )


def _fp8_problems(setting: Setting) -> list[str]:
    how = {"strategy": setting.strategy, "bits": setting.bits, "precision": setting.precision}
    return fp8_problems(setting.fp8, **how, capability=None)  # type: ignore[arg-type]


def _tensor_problems(model: Model, setting: Setting) -> list[str]:
    if setting.tensor == 1:
        return []
    reasons = [
        reason
        for parts, bits, reason in model.anatomy.not_split
        if (parts, bits) == (setting.tensor, None if setting.bits is None else 4)
    ]
    saved = {*setting.modules_to_save} & {*model.anatomy.split_names} if setting.adapter != "none" else ()
    return split_problems(setting.strategy, reasons, sorted(saved))


def _context_problems(model: Model, setting: Setting) -> list[str]:
    if setting.context == 1:
        return []
    anatomy, attention = model.anatomy, "auto" if setting.flat else "sdpa"
    return (
        spread_problems(setting.strategy, anatomy.not_spread)
        + context_problems(
            setting.strategy,
            embedding_noise=setting.embedding_noise,
            paired=setting.paired,
            attention=attention,
        )
        + heads_problems(setting.strategy, setting.context, *anatomy.heads)
    )
