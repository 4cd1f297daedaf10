"""What is recommended fits, and nothing that fits is much faster; of what does not fit, the nearest is named."""

import io
import math
import re
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_models import arithmetic
from rich.console import Console

from finetune.cli.planning.launch_command import in_lines, launch_command
from finetune.cli.planning.plan_tables import print_plan
from finetune.cli.planning.reasons import reasons
from finetune.config.command_line import parse
from finetune.config.compatibility import Cell, refusal
from finetune.config.strategy_names import SHARDED_PARTS, SIZES, STAGES, STRATEGIES, TENSOR, TOGETHER
from finetune.errors import InputError, RunStopped
from finetune.hardware.cards import parse_gpus
from finetune.planner import candidates as module_of_candidates
from finetune.planner.candidates import SAME_SETTING_SPEED, candidates, splits
from finetune.planner.choose import plan
from finetune.planner.judged_rows import Need, Row, judged, verdict
from finetune.planner.memory import PARTS, StepMemory, needed_bytes
from finetune.planner.possible import why_not
from finetune.planner.preference import SAME_SPEED
from finetune.planner.question import METHODS, Question
from finetune.trace.placement import placement_of, world_sizes_problem
from finetune.trace.setting import Setting
from finetune.trace.tracer import key_setting
from recipes.sft import Config

GIB = 2**30
LLAMA_8B = arithmetic("llama-3.1-8b")
SMALL = arithmetic("smollm2-135m")


def question(gpus: str = "8xH100", batch: int = 64, **others: object) -> Question:
    machines = parse_gpus(gpus)
    base = Setting(world_size=machines.world_size, row_tokens=2048)
    asked = Question(SMALL, machines, base, global_batch_size=batch, mean_document_tokens=2048)
    return replace(asked, **others)  # type: ignore[arg-type]


def row_of(asked: Question, setting: Setting, size: float) -> Row:
    """A row that needs so many bytes of a GPU, and is as fast as it is."""
    return Row(
        setting=setting,
        memory=StepMemory(dict.fromkeys(PARTS, 0) | {"activations": int(size)}, {}),
        gpu=Need("GPU memory", int(size), int(asked.machines.gpu.memory_gib * GIB)),
        host=Need("host memory", GIB, asked.host_bytes),
        disk=Need("disk", GIB, asked.disk_bytes),
        time=asked.model.time(setting, asked.machines, mean_document_tokens=asked.attended(setting)),
    )


def grows(smaller: Setting, larger: Setting) -> bool:
    """Whether the arithmetic model needs no less for the second."""
    first, second = (LLAMA_8B.memory(each).peak for each in (smaller, larger))
    return first <= second


SPREAD = {size.field: 2 for size in (STAGES, TENSOR)}
STRATEGIES_AND_METHODS = [
    Setting(
        strategy,
        8,
        adapter=method.adapter,
        bits=method.bits,
        row_tokens=512,
        activation_checkpointing=recomputes,
        **{size.field: SPREAD[size.field] for size in SIZES.get(strategy, ()) if size.field in SPREAD},
    )
    for strategy, method, recomputes in product(STRATEGIES[1:], METHODS.values(), (False, True))
]


@pytest.mark.parametrize("changed", ["rows", "tokens", "processes", "bits", "checkpointing", "weights"])
def test_models_of_these_tests_grow_as_real_ones_do(changed: str):
    """What is asked of the planner below has no answer otherwise."""
    for each in STRATEGIES_AND_METHODS:
        smaller, larger = {
            "rows": (each, replace(each, micro_batch_size=2)),
            "tokens": (each, replace(each, row_tokens=1024)),
            "processes": (replace(each, world_size=16), each),
            "bits": (replace(each, bits=4), replace(each, bits=8)) if each.bits else (each, each),
            "checkpointing": (
                replace(each, activation_checkpointing=True),
                replace(each, activation_checkpointing=False),
            ),
            "weights": (replace(each, weights="bf16"), each),
        }[changed]
        assert grows(smaller, larger), each
    every = {LLAMA_8B.memory(each).peak for each in STRATEGIES_AND_METHODS}
    assert len(every) > len(STRATEGIES_AND_METHODS) / 2


@pytest.mark.parametrize(
    ("needed", "said"),
    [(0, "fits"), (900, "fits"), (901, "tight"), (1000, "tight"), (1001, "does not fit"), (10**9, "does not fit")],
)
def test_verdict_changes_at_nine_tenths_and_at_all_of_the_memory(needed: int, said: str):
    assert verdict(needed, 1000) == said


def test_memory_that_is_not_known_is_no_obstacle_and_one_that_is_too_small_is():
    asked = question("1xH100")
    setting = asked.ways(asked.base, checkpointing=False)[0]
    assert row_of(asked, setting, GIB).verdict == "fits"
    assert row_of(replace(asked, host_bytes=GIB - 1), setting, GIB).verdict == "does not fit"
    assert row_of(replace(asked, disk_bytes=GIB), setting, GIB).verdict == "tight"
    assert row_of(replace(asked, disk_bytes=GIB), setting, GIB).worst.what == "disk"


@pytest.mark.parametrize("adapter", ["none", "lora"])
def test_what_is_swapped_to_disk_must_find_room_once_beside_all_checkpoints(adapter: str):
    """A run of 32.5 million weights had 18.0 bytes of each in nvme_offload: weights in bf16, and for masters, two
    averages and gradients 16 in all."""
    setting = Setting("zero3_nvme", 8, row_tokens=2048, adapter=adapter)
    asked = replace(question(model=LLAMA_8B, base=setting), checkpoints=3)
    swapped, checkpoint = LLAMA_8B.swapped_bytes(setting), LLAMA_8B.checkpoint_bytes(setting)
    if adapter == "none":
        assert swapped == 18 * LLAMA_8B.anatomy.parameters
    else:
        assert 2 < swapped / LLAMA_8B.anatomy.parameters < 2.2
    room = 3 * checkpoint + swapped
    for there, fits in ((room + 3, True), (room - 3, False)):
        need = judged(replace(asked, disk_bytes=there), setting).disk
        assert need.bytes == checkpoint + swapped
        assert (need.verdict != "does not fit") == fits
    assert LLAMA_8B.swapped_bytes(replace(setting, strategy="zero3_offload")) == 0


@pytest.mark.parametrize("gpus", [1, 8])
def test_state_on_disk_takes_less_host_memory_than_state_in_it(gpus: int):
    on_disk, in_memory = (
        LLAMA_8B.host_bytes(Setting(strategy, gpus, row_tokens=2048), processes_of_machine=gpus)
        for strategy in ("zero3_nvme", "zero3_offload")
    )
    assert on_disk < 0.65 * in_memory


def test_what_a_gpu_needs_beside_its_allocator_counts():
    """A card that holds the peak and no more must not be called large enough."""
    asked = question("1xH100", batch=1, methods=(METHODS["full"],))
    setting = asked.ways(asked.base, checkpointing=False)[0]
    peak = SMALL.memory(setting).peak
    card = replace(asked.machines.gpu, memory_gib=1.01 * peak / GIB)
    too_small = replace(asked, machines=replace(asked.machines, gpu=card))
    row = judged(too_small, setting)
    assert row.memory.peak < row.gpu.there < row.gpu.bytes == needed_bytes(row.memory, setting)
    assert row.verdict == "does not fit"


def every_setting(asked: Question) -> list[Setting]:
    return [
        setting
        for strategy in asked.strategies
        for method in asked.methods
        if why_not(asked.model, base := replace(asked.base, strategy=strategy, **method._asdict())) is None
        for checkpointing in asked.checkpointing
        for setting in asked.ways(base, checkpointing=checkpointing)
    ]


@st.composite
def memories(draw: st.DrawFn) -> dict[tuple[str, str, int | None, bool], tuple[float, float]]:
    """GiB that a way to train holds, and that each of its rows adds; without checkpointing no less than with it."""
    found = {}
    for strategy in STRATEGIES:
        for method in METHODS.values():
            held, full, none = (draw(st.floats(0.1, 60)) for _ in range(3))
            found[(strategy, *method, True)] = held, full
            found[(strategy, *method, False)] = held, full + none
    return found


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(memory=memories(), gpus=st.sampled_from(["1xH100", "4xH100", "2x8xA100"]), batch=st.sampled_from([16, 48, 96]))
def test_recommended_fits_and_nothing_on_the_gpus_is_faster_by_more_than_a_tenth(memory, gpus: str, batch: int):
    asked = question(gpus, batch)

    def judge(asked: Question, setting: Setting) -> Row:
        kind = (setting.strategy, setting.adapter, setting.bits, setting.activation_checkpointing)
        held, each = memory[kind]
        return row_of(asked, setting, (held + each * setting.micro_batch_size) * GIB)

    answer = plan(asked, judge)
    shown = {row.setting.strategy for row in answer.rows}
    rows = [judge(asked, setting) for setting in every_setting(asked) if setting.strategy in shown]
    for accepted in ("fits", "tight"):
        fitting = [row for row in rows if row.verdict == accepted]
        if fitting:
            assert answer.best is not None
            best = answer.best
            assert best.verdict == accepted
            if accepted == "fits":
                on_gpu = [row for row in fitting if not row.offloads]
                assert best.offloads == (not on_gpu)
                fastest = max(row.time.tokens_per_second for row in on_gpu or fitting)
                assert best.time.tokens_per_second >= (1 - SAME_SPEED) * (1 - SAME_SETTING_SPEED) * fastest
            return
    assert answer.best is None


def test_the_fastest_way_is_counted_among_slower_ones_only_and_a_faster_offloaded_one_is_named():
    asked = question("1x24GB", batch=256, model=arithmetic("llama-2-13b"))
    answer = plan(asked)
    assert answer.best is not None
    best, reason = answer.best, " ".join(reasons(answer))
    speed = best.time.tokens_per_second
    fitting = [row for row in answer.rows if row.verdict == "fits"]
    counted = [row for row in fitting if not row.offloads]
    fastest = max(fitting, key=lambda row: row.time.tokens_per_second)
    assert fastest.time.tokens_per_second > 1.2 * speed  # there is something to be said
    assert speed == max(row.time.tokens_per_second for row in counted)
    assert re.search(r"is the fastest of (\d+) options that fit on the GPU\.", reason)[1] == str(len(counted))
    assert f"with {fastest.host.bytes / GIB:,.0f} GiB of host memory per machine" in reason
    assert f"{fastest.name} is predicted to reach {fastest.time.tokens_per_second / speed:.0%} of that speed" in reason


def test_all_rows_of_an_answer_are_traced_together_and_what_recomputes_only_where_it_could_win():
    """A small model keeps all its activations: nothing that recomputes them is traced, and nothing twice."""
    asked = question(model=arithmetic("smollm2-135m"))
    rows, _ = candidates(asked)
    [together] = asked.model.tracer.rounds
    traced = {key_setting(row.setting) for row in rows}
    assert {(each.strategy, each.adapter, each.bits) for each in together} == {
        (each.strategy, each.adapter, each.bits) for each in traced
    }
    assert not any(each.activation_checkpointing for each in together)
    large = question(model=arithmetic("llama-3.1-8b"), batch=256)
    candidates(large)
    assert len(large.model.tracer.rounds) == 2
    assert all(each.activation_checkpointing for each in large.model.tracer.rounds[1])


def test_no_more_layers_are_recomputed_than_the_gpu_needs():
    """Where neither all activations fit nor all have to be recomputed, it is as few layers as fit, and faster."""
    asked = question("1x24GB", batch=16, model=LLAMA_8B)
    (row,) = [row for row in candidates(asked)[0] if row.setting.method == METHODS["qlora"] and not row.offloads]
    layers = row.setting.recomputed_layers
    assert row.verdict == "fits"
    assert layers is not None
    assert 1 < layers < LLAMA_8B.anatomy.layers
    one_less = judged(asked, replace(row.setting, recomputed_layers=layers - 1))
    full = judged(asked, replace(row.setting, recomputed_layers=None))
    assert one_less.verdict != "fits"
    assert full.memory.peak < row.memory.peak < one_less.memory.peak
    assert row.time.tokens_per_second > 1.1 * full.time.tokens_per_second


@pytest.mark.parametrize("forgets", ["bisection", "verdict"])
def test_a_false_fit_would_be_seen(forgets: str, monkeypatch: pytest.MonkeyPatch):
    """The property above fails for a chooser that takes the largest micro-batch, or one that looks at no memory."""

    def judge(asked: Question, setting: Setting) -> Row:
        return row_of(asked, setting, 10.0 * GIB * setting.micro_batch_size)

    asked = question("1xT4", batch=16, base=Setting(row_tokens=2048, precision="fp16"))
    assert all(row.verdict == "fits" for row in candidates(asked, judge)[0])
    if forgets == "bisection":
        monkeypatch.setattr(module_of_candidates, "bisect_left", lambda settings, *_, **__: len(settings))
        assert any(row.verdict != "fits" for row in candidates(asked, judge)[0])
    else:
        monkeypatch.setattr(Row, "verdict", "fits")
        assert any(row.gpu.bytes > row.gpu.there for row in candidates(asked, judge)[0])


@pytest.mark.parametrize("gpus", ["1xH100", "8xH100", "3xH100", "2x4xH100"])
def test_every_strategy_and_method_is_a_row_or_has_a_reason(gpus: str):
    asked = question(gpus, batch=24)
    rows, left_out = candidates(asked)
    world_size = asked.machines.world_size
    found = {(row.setting.strategy, row.setting.method) for row in rows}
    assert not found & {(each.strategy, each.method) for each in left_out}
    for strategy in STRATEGIES:
        for method in METHODS.values():
            sizes = (Setting(strategy, **each).sizes for each in splits(strategy, asked.machines, 30))
            is_possible = (
                any(world_sizes_problem(strategy, world_size, each) is None for each in sizes)
                and strategy != "ep"  # the model has no experts
                and refusal(Cell(strategy, method.bits, method.adapter, "adamw")) is None
            )
            place = placement_of(strategy, world_size)
            is_pointless = world_size == 1 and place.framework != "plain" and place.optimizer_on == "gpu"
            is_pointless |= strategy == "hsdp" and gpus != "2x4xH100"
            is_pointless |= strategy in TOGETHER  # of rows that are short
            is_pointless |= strategy in ("tp_pp", *SHARDED_PARTS)  # since the parts of this model fit
            assert ((strategy, method) in found) == (is_possible and not is_pointless)


def test_a_row_of_the_answer_is_what_the_model_says_of_its_setting():
    asked = question(model=LLAMA_8B)
    answer = plan(asked)
    assert len(answer.rows) > 20
    for row in answer.rows:
        assert row.memory == LLAMA_8B.memory(row.setting)
        assert row.setting.micro_batch_size * row.setting.accumulation * row.setting.data_processes == 64


def test_a_strategy_whose_step_cannot_be_traced_is_told_below_the_table():
    def judge(asked: Question, setting: Setting) -> Row:
        if setting.strategy == "fsdp2":
            raise RunStopped("The step under fsdp2 cannot be traced here.")
        return judged(asked, setting)

    console = Console(file=io.StringIO(), width=80)
    print_plan(plan(question(strategies=("fsdp2", "zero3", "cp")), judge), console, model="Llama 3.1 8B")
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\nfsdp2 is not compared. The step under fsdp2 cannot be traced here.\n" in printed
    assert printed.count("is not compared") == 1  # cp is refused for padded rows, which is no fault


def test_what_is_given_stays_as_it_is():
    asked = question(micro_batch_size=4, checkpointing=(True,), methods=(METHODS["lora"],))
    for row in plan(asked).rows:
        assert (row.setting.micro_batch_size, row.setting.activation_checkpointing) == (4, True)
        assert (row.setting.adapter, row.setting.bits) == ("lora", None)


def test_quantised_weights_of_a_published_model_are_not_trained():
    published = {"load_in_4bit": True, "quant_method": "bitsandbytes"}
    asked = question(model=arithmetic("smollm2-135m", quantization_config=published))
    answer = plan(asked)
    assert {row.setting.method for row in answer.rows} == {METHODS["qlora"]}
    assert "published in 4 bits" in next(each.why for each in answer.impossible if each.method == METHODS["full"])
    assert "--quantization.bits" not in in_lines(launch_command(asked, answer.rows[0].setting))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"weights": "bf16", "precision": "fp16"}, "computes in bf16"),
        ({"weights": "bf16", "optimizer": "sgd"}, "small updates of sgd"),
        ({"optimizer": "adafactor"}, "Adafactor needs"),
    ],
)
def test_impossible_combinations_are_told_why(fields: dict[str, str], sentence: str):
    base = replace(question().base, **fields)
    asked = question(base=base, strategies=(STRATEGIES[2],), methods=(METHODS["full"],))
    with pytest.raises(InputError, match=sentence):
        plan(asked)


def test_the_command_of_a_run_without_an_adapter_takes_back_what_the_configuration_says_of_it():
    asked = question(adapter_defaults=(("adapter.rank", "16"),), flags=(("adapter.rank", "8"),))
    for adapter, said in (("none", "16"), ("lora", "8")):
        words = [word for group in launch_command(asked, replace(asked.base, adapter=adapter)) for word in group]
        assert [words[place + 1] for place, word in enumerate(words) if word == "--adapter.rank"] == [said]


def test_where_no_disk_is_left_nothing_fits():
    full = Need("disk", 5, 0)
    assert (full.share, full.verdict) == (math.inf, "does not fit")
    assert Need("disk", 0, 0).share == 0


@pytest.mark.parametrize("gpus", ["1xH100", "8xH100", "2x8xH100", "4xT4"])
def test_command_starts_the_run_that_was_planned(gpus: str):
    machines = parse_gpus(gpus)
    precision = "bf16" if machines.gpu.bf16 else "fp16"
    base = Setting(world_size=machines.world_size, row_tokens=2048, precision=precision)
    flags = (("model.path", "a model"), ("data.train", "x.jsonl"), ("train.output_dir", "out"))
    flags += (("train.micro_batch_size", "3"), ("train.global_batch_size", "64"))
    asked = question(gpus, base=base, flags=flags)
    rows = plan(asked).rows
    assert len({row.setting.strategy for row in rows}) >= 4
    for row in rows:
        words = [word for group in launch_command(asked, row.setting) for word in group]
        place = words.index("recipes/sft.py")
        launcher = dict(zip(words[2:place:2], words[3:place:2], strict=True))
        assert launcher["--config_file"] == f"accelerate_configs/{row.setting.strategy}.yaml"
        assert launcher["--num_processes"] == str(machines.world_size)
        assert ("--num_machines" in launcher) == (machines.nodes > 1)
        assert launcher.get("--mixed_precision", "bf16") == precision
        config = parse(Config, words[place + 1 :])
        assert config.train.micro_batch_size == row.setting.micro_batch_size
        assert str(config.train.activation_checkpointing) == row.setting.recomputes
        assert config.adapter.type == row.setting.adapter
        assert config.quantization.bits == (row.setting.bits or "none")
        assert (config.train.weights, config.train.optimizer) == (row.setting.weights, row.setting.optimizer)
        assert config.train.global_batch_size == 64
