"""What is recommended fits, and nothing that fits is much faster; of what does not fit, the nearest is named."""

import json
import math
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetune.config.command_line import parse
from finetune.config.compatibility import STRATEGIES, Cell, refusal
from finetune.errors import InputError
from finetune.hardware.cards import parse_gpus
from finetune.planner import candidates as module_of_candidates
from finetune.planner.candidates import SAME_SETTING_SPEED, candidates, why_not
from finetune.planner.choose import plan
from finetune.planner.judged_rows import Need, Row, judged, verdict
from finetune.planner.launch_command import in_lines, launch_command
from finetune.planner.nearest import nearest_that_fits
from finetune.planner.peak_memory import StepMemory, needed_bytes, step_memory
from finetune.planner.preference import SAME_SPEED
from finetune.planner.question import METHODS, Question
from finetune.planner.shape import shape_of
from finetune.planner.speed import step_time
from finetune.planner.tape import KINDS
from finetune.trace.placement import placement_of, world_sizes_problem
from finetune.trace.setting import Setting
from recipes.sft import Config

GIB = 2**30
CONFIGS = json.loads((Path(__file__).parent / "model_configs.json").read_text())
LLAMA_8B = shape_of(CONFIGS["llama-3.1-8b"]["config"])
SMALL = shape_of(CONFIGS["smollm2-135m"]["config"])


def question(gpus: str = "8xH100", batch: int = 64, **others: object) -> Question:
    machines = parse_gpus(gpus)
    base = Setting(world_size=machines.world_size, row_tokens=2048)
    asked = Question(SMALL, machines, base, global_batch_size=batch, mean_document_tokens=2048)
    return replace(asked, **others)  # type: ignore[arg-type]


def row_of(asked: Question, setting: Setting, size: float) -> Row:
    """A row that needs so many bytes of a GPU, and is as fast as it is."""
    return Row(
        setting=setting,
        memory=StepMemory(dict.fromkeys(KINDS, 0) | {"activations": int(size)}, {}, ()),
        gpu=Need("GPU memory", int(size), int(asked.machines.gpu.memory_gib * GIB)),
        host=Need("host memory", GIB, asked.host_bytes),
        disk=Need("disk", GIB, asked.disk_bytes),
        time=step_time(asked.shape, setting, asked.machines, mean_document_tokens=asked.mean_document_tokens),
    )


@pytest.mark.parametrize(
    ("needed", "said"),
    [(0, "fits"), (900, "fits"), (901, "tight"), (1000, "tight"), (1001, "does not fit"), (10**9, "does not fit")],
)
def test_verdict_changes_at_nine_tenths_and_at_all_of_the_memory(needed: int, said: str):
    assert verdict(needed, 1000) == said


def test_memory_that_is_not_known_is_no_obstacle_and_one_that_is_too_small_is():
    setting = question().setting("single", METHODS["full"], False, 1)
    asked = question("1xH100")
    setting = replace(setting, world_size=1)
    assert row_of(asked, setting, GIB).verdict == "fits"
    assert row_of(replace(asked, host_bytes=GIB - 1), setting, GIB).verdict == "does not fit"
    assert row_of(replace(asked, disk_bytes=GIB), setting, GIB).verdict == "tight"
    assert row_of(replace(asked, disk_bytes=GIB), setting, GIB).worst.what == "disk"


def test_what_a_gpu_needs_beside_its_allocator_counts():
    """A card that holds the peak and no more must not be called large enough."""
    asked = question("1xH100", batch=1, methods=(METHODS["full"],))
    setting = asked.setting("single", METHODS["full"], False, 1)
    peak = step_memory(SMALL, setting).peak
    card = replace(asked.machines.gpu, memory_gib=1.01 * peak / GIB)
    too_small = replace(asked, machines=replace(asked.machines, gpu=card))
    row = judged(too_small, setting)
    assert row.memory.peak < row.gpu.there < row.gpu.bytes == needed_bytes(row.memory, setting)
    assert row.verdict == "does not fit"


def every_setting(asked: Question) -> list[Setting]:
    return [
        asked.setting(strategy, method, checkpointing, size)
        for strategy in asked.strategies
        for method in asked.methods
        if why_not(asked, strategy, method) is None
        for checkpointing in asked.checkpointing
        for size in asked.micro_batch_sizes
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


@settings(max_examples=20, deadline=None)
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
            assert answer.recommendation is not None
            best = answer.recommendation.row
            assert best.verdict == accepted
            if accepted == "fits":
                on_gpu = [row for row in fitting if not row.offloads]
                assert best.offloads == (not on_gpu)
                fastest = max(row.time.tokens_per_second for row in on_gpu or fitting)
                assert best.time.tokens_per_second >= (1 - SAME_SPEED) * (1 - SAME_SETTING_SPEED) * fastest
            return
    assert answer.recommendation is None


def test_the_fastest_way_is_counted_among_slower_ones_only_and_a_faster_offloaded_one_is_named():
    asked = question("1x24GB", batch=16, shape=LLAMA_8B)
    answer = plan(asked)
    assert answer.recommendation is not None
    best, reason = answer.recommendation.row, answer.recommendation.reason
    speed = best.time.tokens_per_second
    fitting = [row for row in answer.rows if row.verdict == "fits"]
    counted = [row for row in fitting if not row.offloads]
    fastest = max(fitting, key=lambda row: row.time.tokens_per_second)
    assert fastest.time.tokens_per_second > 1.2 * speed  # there is something to be said
    assert speed == max(row.time.tokens_per_second for row in counted)
    assert re.search(r"is the fastest of (\d+) options that fit on the GPU\.", reason)[1] == str(len(counted))
    assert f"with {fastest.host.bytes / GIB:,.0f} GiB of host memory per machine" in reason
    assert f"{fastest.name} is predicted to reach {fastest.time.tokens_per_second / speed:.0%} of that speed" in reason


@pytest.mark.parametrize("forgets", ["bisection", "verdict"])
def test_a_false_fit_would_be_seen(forgets: str, monkeypatch: pytest.MonkeyPatch):
    """The property above fails for a chooser that takes the largest micro-batch, or one that looks at no memory."""

    def judge(asked: Question, setting: Setting) -> Row:
        return row_of(asked, setting, 10.0 * GIB * setting.micro_batch_size)

    asked = question("1xT4", batch=16, base=Setting(row_tokens=2048, precision="fp16"))
    assert all(row.verdict == "fits" for row in candidates(asked, judge)[0])
    if forgets == "bisection":
        monkeypatch.setattr(module_of_candidates, "_that_fit", lambda settings, row: len(settings))
        assert any(row.verdict != "fits" for row in candidates(asked, judge)[0])
    else:
        monkeypatch.setattr(Row, "verdict", "fits")
        assert any(row.gpu.bytes > row.gpu.there for row in candidates(asked, judge)[0])


@pytest.mark.parametrize("gpus", ["1xH100", "8xH100", "3xH100", "2x4xH100"])
def test_every_strategy_and_method_is_a_row_or_has_a_reason(gpus: str):
    asked = question(gpus, batch=24)
    rows, left_out = candidates(asked)
    world_size = asked.machines.world_size
    found = {(row.setting.strategy, row.method) for row in rows}
    assert not found & {(each.strategy, each.method) for each in left_out}
    for strategy in STRATEGIES:
        for method in METHODS.values():
            is_possible = (
                world_sizes_problem(strategy, world_size) is None
                and refusal(Cell(strategy, method.bits, method.adapter, "adamw")) is None
            )
            place = placement_of(strategy, world_size)
            is_pointless = world_size == 1 and place.framework != "plain" and place.optimizer_on == "gpu"
            is_pointless |= strategy == "hsdp" and gpus != "2x4xH100"
            assert ((strategy, method) in found) == (is_possible and not is_pointless)


@pytest.mark.slow
def test_a_row_of_the_answer_is_what_the_formulas_say_of_its_setting():
    asked = replace(question(), shape=LLAMA_8B)
    answer = plan(asked)
    assert len(answer.rows) > 20
    for row in answer.rows:
        assert row.memory == step_memory(LLAMA_8B, row.setting)
        assert row.setting.micro_batch_size * row.setting.accumulation * 8 == 64


def test_what_is_given_stays_as_it_is():
    asked = question(micro_batch_size=4, checkpointing=(True,), methods=(METHODS["lora"],))
    for row in plan(asked).rows:
        assert (row.setting.micro_batch_size, row.setting.activation_checkpointing) == (4, True)
        assert (row.setting.adapter, row.setting.bits) == ("lora", None)


def test_quantised_weights_of_a_published_model_are_not_trained():
    asked = question(shape=replace(SMALL, published_bits=4))
    answer = plan(asked)
    assert {row.method for row in answer.rows} == {METHODS["qlora"]}
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


@pytest.mark.slow
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
        assert (config.train.activation_checkpointing == "full") == row.setting.activation_checkpointing
        assert config.adapter.type == row.setting.adapter
        assert config.quantization.bits == (row.setting.bits or "none")
        assert (config.train.weights, config.train.optimizer) == (row.setting.weights, row.setting.optimizer)
        assert config.train.global_batch_size == 64


CHANGES = {
    "train.micro_batch_size": lambda setting: setting.micro_batch_size == 1,
    "train.activation_checkpointing": lambda setting: setting.activation_checkpointing,
    "train.optimizer": lambda setting: setting.optimizer == "adamw_8bit",
    "train.weights": lambda setting: setting.weights == "bf16",
    "strategy": lambda setting: setting.strategy != "ddp",
    "adapter.type": lambda setting: setting.adapter == "lora",
    "quantization.bits": lambda setting: setting.bits == 4,
    "data.max_length": lambda setting: setting.row_tokens <= 512,
}


@settings(max_examples=40, deadline=None)
@given(needed=st.sets(st.sampled_from(sorted(CHANGES))))
def test_nearest_that_fits_changes_what_is_needed_and_nothing_else(needed: set[str]):
    """Where exactly some changes make a run fit, these are proposed."""
    needed |= {"adapter.type"} if "quantization.bits" in needed else set()
    start = Setting("ddp", 4, row_tokens=2048, micro_batch_size=2, accumulation=2)

    def judge(asked: Question, setting: Setting) -> Row:
        return row_of(asked, setting, 10 * GIB if all(CHANGES[key](setting) for key in needed) else 100 * GIB)

    found = nearest_that_fits(SMALL, start, parse_gpus("4xH100"), judge=judge)
    assert found is not None
    assert set(found.changes) | ({"strategy"} if found.strategy else set()) == needed
    assert found.row.setting.micro_batch_size * found.row.setting.accumulation == 4
    if "data.max_length" in needed:
        assert found.changes["data.max_length"] == "512"
    assert all(f"{key} to {value}" in found.text for key, value in found.changes.items())


def test_a_milder_change_is_proposed_before_a_harsher_one():
    start = Setting("ddp", 4, row_tokens=2048, micro_batch_size=4, accumulation=1)

    def judge(asked: Question, setting: Setting) -> Row:
        enough = setting.micro_batch_size <= 2 or setting.adapter == "lora" or setting.row_tokens < 2048
        return row_of(asked, setting, GIB if enough else 100 * GIB)

    found = nearest_that_fits(SMALL, start, parse_gpus("4xH100"), judge=judge)
    assert found is not None
    assert (found.changes, found.strategy) == ({"train.micro_batch_size": "2"}, None)


def test_harsher_changes_are_made_only_where_all_milder_ones_are_not_enough():
    """The order of the changes: each alone is enough, and the mildest that is left is taken."""
    start = Setting("ddp", 4, row_tokens=2048, micro_batch_size=2, accumulation=2)
    mildest_first = [
        "train.micro_batch_size",
        "train.activation_checkpointing",
        "strategy",
        "train.optimizer",
        "train.weights",
        "adapter.type",
    ]
    for number, mildest in enumerate(mildest_first):
        enough = mildest_first[number:]

        def judge(asked: Question, setting: Setting, enough: list[str] = enough) -> Row:
            return row_of(asked, setting, 10 * GIB if any(CHANGES[key](setting) for key in enough) else 100 * GIB)

        found = nearest_that_fits(SMALL, start, parse_gpus("4xH100"), judge=judge)
        assert found is not None
        assert [*found.changes, *(["strategy"] if found.strategy else [])] == [mildest]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["fsdp2_offload", "zero3_offload", "zero3_nvme"])
def test_nearest_to_what_needs_too_much_host_memory_stays_on_the_gpus(strategy: str, precision: str):
    start = Setting(strategy, 8, row_tokens=2048, micro_batch_size=2, precision=precision)
    found = nearest_that_fits(LLAMA_8B, start, parse_gpus("8xH100"), host_bytes=40 * GIB)
    assert found is not None
    assert not found.row.offloads
    assert found.strategy not in (None, "hsdp")
    assert found.row.setting.weights == "fp32_master"


def test_nearest_says_what_bf16_weights_give_up():
    found = nearest_that_fits(LLAMA_8B, Setting(row_tokens=2048), parse_gpus("1xH100"))
    assert found is not None
    assert found.changes["train.weights"] == "bf16"
    assert any("no fp32 master copy" in sentence for sentence in found.given_up)


def test_nearest_that_fits_is_none_where_nothing_does():
    def judge(asked: Question, setting: Setting) -> Row:
        return row_of(asked, setting, 1000 * GIB)

    assert nearest_that_fits(SMALL, Setting(row_tokens=2048), parse_gpus("1xH100"), judge=judge) is None


def test_nearest_of_an_8b_model_fits_by_the_formulas():
    start = Setting("ddp", 8, row_tokens=4096, micro_batch_size=4, accumulation=2)
    machines = parse_gpus("8xH100")
    found = nearest_that_fits(LLAMA_8B, start, machines)
    assert found is not None
    assert needed_bytes(step_memory(LLAMA_8B, found.row.setting), found.row.setting) <= 0.9 * 79.1 * GIB
    assert found.row.setting.adapter == "none"  # sharding suffices
    assert math.isclose(found.row.gpu.there or 0, 79.1 * GIB, abs_tol=1)
    assert asdict(found.row.setting)["world_size"] == 8
