"""Every architecture that people fine-tune can be traced, and its fake tensors take the bytes of real ones."""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from full_trace import full_trace
from plan_models import CONFIGS
from test_families import EXPERTS, FAMILIES, MIXTURES, SIZES
from thinning import thinned
from tracing import begun, traced_step

from finetune.models.loading import config_from, without_weights
from finetune.planner.speed import PHASES
from finetune.trace.anatomy import anatomy_of
from finetune.trace.layers import Anatomy
from finetune.trace.setting import Setting
from finetune.trace.shallow import Step

SHARED = Path(__file__).parent.parent.parent / "shared" / "configs"
"""Configurations of published models beside the repository, with the number of their parameters."""
LORA = Setting(adapter="lora", rank=8, accumulation=2)
LAYERS = 7
"""Of a published model that is cut short: more than Gemma 3 has before its layers repeat."""
LONGEST = 4608
"""Positions of a row: more than the windows of Gemma 2 and Mistral have."""
SMALLEST = {
    kind: min(
        (each for each in CONFIGS.values() if each["config"]["model_type"] == kind), key=lambda each: each["parameters"]
    )
    for kind in sorted({each["config"]["model_type"] for each in CONFIGS.values()})
}
"""Published models by their architecture."""


def anatomy(config: dict[str, Any]) -> Anatomy:
    known = config_from(config)
    return anatomy_of(known, without_weights(known, trust_remote_code=False))


def cut_short(config: dict[str, Any]) -> dict[str, Any]:
    return anatomy(config).shortened(config, LAYERS)


@pytest.mark.prove
@pytest.mark.skipif(not SHARED.is_dir(), reason=f"{SHARED} is not here")
def test_configurations_beside_the_repository_have_the_parameters_that_are_published():
    counts = json.loads((SHARED / "param_counts.json").read_text())
    files = sorted(path for path in SHARED.glob("*.json") if path.name != "param_counts.json")
    assert len({path.name for path in files} & set(counts)) > 20
    for path in files:
        found = anatomy(json.loads(path.read_text()))
        assert found.parameters == counts.get(path.name, found.parameters), path.name
        assert found.period <= 6, path.name


PLAIN = Setting(row_tokens=50, micro_batch_size=2)
KINDS = [
    PLAIN,
    replace(PLAIN, adapter="lora", activation_checkpointing=True),
    replace(PLAIN, weights="bf16"),
    replace(PLAIN, adapter="lora", precision="no"),
]
WINDOWS = {"gemma2": 2, "gemma3_text": 6, "olmo3": 5, "mistral": 2, "mixtral": 2}
"""Families whose layers attend within a window, and how many layers have some that do and some that do not."""
WAYS = [(family, KINDS[place % len(KINDS)]) for place, family in enumerate(FAMILIES)]
OTHER_WAYS = [(family, kind) for family in FAMILIES for kind in KINDS if (family, kind) not in WAYS]


def small(family: str) -> dict[str, Any]:
    windows = {"num_hidden_layers": WINDOWS[family], "sliding_window": 20} if family in WINDOWS else {}
    return {"model_type": family, **SIZES, **(EXPERTS if family in MIXTURES else {}), **windows}


@pytest.fixture(scope="module", autouse=True)
def traces(request: pytest.FixtureRequest) -> "Iterator[dict[Any, Future[Any]]]":
    chosen = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    calls: dict[Any, Any] = {
        kind: partial(traced_step, cut_short(each["config"]), LORA, row_tokens=LONGEST)
        for kind, each in SMALLEST.items()
    }
    exact = partial(full_trace, as_on_gpu=False)
    for family, setting in [way for way in [*WAYS, *OTHER_WAYS] if any(each and way == _way(each) for each in chosen)]:
        for real in (False, True):
            calls[family, setting, real] = partial(exact, small(family), setting, real=real)
    with begun(calls) as found:
        yield found


def _way(of_test: Any) -> tuple[Any, Any]:
    return of_test.params.get("family"), of_test.params.get("setting")


@pytest.mark.parametrize("kind", SMALLEST)
def test_published_architecture_is_traced(kind: str, traces: "dict[Any, Future[Step]]"):
    """Forward, a token is multiplied by every weight that it meets but for the embedding; adapters are small.

    Those of experts are multiplied out first, whatever the tokens.
    """
    step, config = traces[kind].result(), cut_short(SMALLEST[kind]["config"])
    products = [each for each in step.kernels if each.kind == "product" and each.phase in PHASES["forward"]]
    flops = sum(each.calls * each.flops.get((1, 1, 0), 0) for each in products) / step.micro_batches
    embedding = 0 if config_from(config).tie_word_embeddings else config["hidden_size"] * config["vocab_size"]
    assert flops == pytest.approx(2 * (anatomy(config).active_parameters - embedding), rel=0.05)
    assert max(moment.bytes for moment in step.moments(step.micro_batch(1, LONGEST))) > 2 * anatomy(config).parameters


@pytest.mark.parametrize(
    ("family", "setting"),
    thinned(WAYS, OTHER_WAYS),
    ids=lambda value: value if isinstance(value, str) else KINDS.index(value),
)
def test_fake_tensors_of_every_family_take_the_bytes_of_real_ones(
    family: str, setting: Setting, traces: "dict[Any, Future[Any]]"
):
    assert traces[family, setting, False].result() == traces[family, setting, True].result()
