"""Fixtures that many tests share: the tiny model, conversations, and groups of processes."""

import gc
import os
import shutil
import signal
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import scenarios
import thinning
import tiny
import torch
from hypothesis import settings
from plan_models import ArithmeticTracer
from ranks import Ranks, without_a_plan
from recording import Recorder

from benchmarks.proofs import MATRICES
from finetune.cli.planning import asked
from finetune.config import strategy_names
from finetune.data import template_process
from finetune.distributed import deepspeed_ops
from finetune.run import session

os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(deepspeed_ops.own_folder()))  # before tests move the folder of caches
settings.register_profile("any machine", deadline=None)  # a slow one fails no property
settings.load_profile("any machine")

STARTING_PROCESSES = {
    "test_adapters",
    "test_architectures",
    "test_demo",
    "test_dry_run",
    "test_gpu_day",
    "test_interruption",
    "test_kills",
    "test_kills_launcher",
    "test_launch",
    "test_notebooks",
    "test_plan_cards",
    "test_plan_configs",
    "test_plan_kernels",
    "test_plan_sharded",
    "test_plan_speed",
    "test_shallow",
    "test_start_up",
    "test_template_process",
    "test_tracer",
    "test_train",
    "test_wheel",
}
"""Files whose tests start processes, or trace a step each; marked ``slow``, as is what uses the fixture ``ranks``."""
ALONE = {"test_interruption", "test_kills", "test_kills_launcher", "test_start_up"}
"""Files in which instants count; marked ``alone``, and run when the others are done."""
SHORTER = {"test_adapters": 5, "test_parity": 10}
"""Steps of the runs of a file, but where proofs are recorded."""
COMPARING_LOSSES = {"test_parity", "test_compatibility", "test_adapters", "test_families", "test_recipes"}
"""Matrices whose points train under a strategy as on one process: `make test` sees each strategy in one of them."""
RUNS_OF_A_GROUP = 50
"""After which its processes are new ones: each run leaves a process a megabyte and a half larger."""
LONGEST = [
    "test_notebooks",
    "test_resuming",
    "test_demo",
    "test_parity",
    "test_adapters",
    "test_resume",
    "test_compatibility",
    "test_state",
    "test_launch",
    "test_train",
    "test_plan_configs",
    "test_dry_run",
    "test_shallow",
    "test_plan_speed",
    "test_architectures",
    "test_plan_sharded",
    "test_families",
    "test_fp16",
    "test_not_finite",
    "test_mutations",
    "test_recipes",
    "test_pretrain",
]
"""Files that take longest, which run first: two workers then end at about the same time."""


@pytest.fixture(scope="session", autouse=True)
def one_process_renders() -> Iterator[None]:
    """The child that renders chat templates takes half a second to start: one for all encoders of all tests."""
    held = template_process.shared_child()
    yield
    del held


@pytest.fixture(scope="module", autouse=True)
def steps_of_a_run(request: pytest.FixtureRequest) -> None:
    """Fewer in `make test`, where nothing that a file shows needs the others."""
    fewer = SHORTER.get(request.module.__name__, scenarios.PROVEN_STEPS)
    scenarios.STEPS = scenarios.PROVEN_STEPS if request.config.option.record_proofs else fewer


@pytest.fixture(scope="module", autouse=True)
def runs_without_a_plan(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs in this process do without, unless their file is marked ``planned``: to trace the step of each new setting
    takes ten times as long as the run."""
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("planned"):
            patch.setattr(session, "plan_of", without_a_plan)
        yield


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.build_model_folder(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def weights_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As model_folder, twice as wide and with its weights in a file, as models are published."""
    folder = tiny.build_model_folder(tmp_path_factory.mktemp("tiny-weights"), hidden_size=128, intermediate_size=256)
    return tiny.write_weights(folder)


@pytest.fixture(scope="session")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """80 training conversations, uneven in length."""
    return tiny.write_conversations(tmp_path_factory.mktemp("data") / "train.jsonl", rows=80)


@pytest.fixture(scope="session")
def held_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_conversations(tmp_path_factory.mktemp("data") / "held_out.jsonl", rows=11, seed=1)


class Groups:
    """Called with n, the group of n processes, started at its first use."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self.new_folder = new_folder
        self.groups: dict[int, Ranks] = {}
        self.runs: Counter[int] = Counter()

    def __call__(self, world_size: int) -> Ranks:
        if world_size not in self.groups:
            self.groups[world_size] = Ranks(world_size, self.new_folder(f"ranks{world_size}"))
        self.runs[world_size] += 1
        self._signal(signal.SIGCONT, world_size)
        return self.groups[world_size]

    def rest(self) -> None:
        """Halt all until they are asked again: the threads of idle groups would wake hundreds of times a second."""
        for world_size in self.groups:
            self._signal(signal.SIGSTOP, world_size)

    def _signal(self, number: signal.Signals, world_size: int) -> None:
        if group := self.groups[world_size].group:
            os.killpg(group, number)

    def stop(self, *, least_runs: int = 0) -> None:
        """End those that have run so much; they start anew when they are asked."""
        for world_size, group in self.groups.items():
            if self.runs[world_size] >= least_runs:
                group.stop()
                self.runs[world_size] = 0


@pytest.fixture(scope="session")
def groups(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Groups]:
    """Those of all files, since the first run of a group takes three times as long as the others."""
    groups = Groups(tmp_path_factory.mktemp)
    yield groups
    groups.stop()


@pytest.fixture(scope="module")
def ranks(groups: Groups) -> Iterator[Groups]:
    """``ranks(n)``: the group of n processes."""
    yield groups
    groups.rest()


@pytest.fixture(autouse=True)
def used_groups_end_between_tests(request: pytest.FixtureRequest) -> None:
    """Not within a test, which may ask what a run leaves to the next one in its process."""
    if "ranks" in request.fixturenames:
        request.getfixturevalue("ranks").stop(least_runs=RUNS_OF_A_GROUP)


@pytest.fixture
def arithmetic_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """``finetune plan`` in this process traces nothing."""
    monkeypatch.setattr(asked, "Tracer", ArithmeticTracer)


@pytest.fixture
def traced_steps(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """``finetune plan`` in this process traces what nobody has traced in this session."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))


def pytest_configure(config: pytest.Config) -> None:
    """Tests rehearse on the CPU wherever they run; those of a GPU are asked for with ``-m gpu``."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs and their children ignore it
    # models of a few thousand weights: threads would wait for one another longer than they compute
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # PyTorch has read the variable
    os.environ["FINETUNE_DATA_CACHE"] = tempfile.mkdtemp(prefix="finetune-tests-")
    if config.option.markexpr != "gpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if config.option.record_proofs:
        config.pluginmanager.register(Recorder())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read only the files that run alone where these are asked for: the others take ten seconds."""
    asked = config.option.markexpr.startswith("alone ")
    return True if asked and collection_path.suffix == ".py" and collection_path.stem not in ALONE else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make check` leaves out, what runs alone, and what of a matrix is left to `make prove`, and have the
    longest files run first."""
    of_matrices = defaultdict(list)
    for item in items:
        file, on_ranks = item.path.stem, "ranks" in getattr(item, "fixturenames", ())
        if file in STARTING_PROCESSES or on_ranks:
            item.add_marker("slow")
        if file in ALONE:
            item.add_marker("alone")
        if file in MATRICES and not item.get_closest_marker("prove"):
            parameters = item.callspec.params if hasattr(item, "callspec") else {}
            of_matrices[file, on_ranks].append((item, (item.originalname, parameters)))
    strategies = {repr(name): 0 for name in strategy_names.STRATEGIES}
    for (file, on_ranks), points in sorted(of_matrices.items(), key=lambda each: [*MATRICES].index(each[0][0])):
        shared = strategies if on_ranks and file in COMPARING_LOSSES else None
        kept = thinning.kept([point for _, point in points], shared)
        for place, (item, _) in enumerate(points):
            if place not in kept:
                item.add_marker("prove")
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare garbage collection the libraries' objects, which stay."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["FINETUNE_DATA_CACHE"], ignore_errors=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-proofs", action="store_true", help="write what is proven to benchmarks/results")


@pytest.fixture
def terminal() -> Iterator[None]:
    """Whose end is heard, though nohup may have started the tests."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)
