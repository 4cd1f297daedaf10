"""`--probe`: what is said of made-up measurements beside a made-up prediction, and real steps on a CPU."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from finetune.cli import plan_verb
from finetune.cli.planning import probe as probe_module
from finetune.cli.planning import probed
from finetune.cli.planning.probe import Probed, probe_in_child
from finetune.errors import InputError
from finetune.hardware.cards import Machines, parse_gpus
from finetune.planner import Model
from finetune.planner.judged_rows import Row, judged
from finetune.planner.memory import StepMemory, needed_bytes
from finetune.planner.question import Question, question_about
from finetune.planner.speed import Parts, StepTime
from finetune.trace.setting import Setting
from finetune.units import GIB

H200 = parse_gpus("1xH200")
SETTING = Setting(micro_batch_size=2, row_tokens=4096, accumulation=8)


class MadeUp:
    """In the place of ``planner.Model``: 10 GiB and 1 MiB for each token; a second for each micro-batch."""

    def memory(self, setting: Setting, *, large_workspaces: bool) -> StepMemory:
        return StepMemory({"weights": 10 * GIB, "activations": 2**20 * setting.tokens}, {})

    def time(self, setting: Setting, machines: Machines, *, mean_document_tokens: float) -> StepTime:
        parts = Parts(float(setting.accumulation), 0, 0, 0, 0, 0, 0)
        is_known = machines.gpu.tflops is not None
        tokens = setting.tokens * setting.accumulation
        return StepTime(parts, tokens, 1e12, 1e15, (), None if is_known else "another card")

    def host_bytes(self, setting: Setting, *, processes_of_machine: int) -> int:
        return GIB

    def checkpoint_bytes(self, setting: Setting) -> int:
        return GIB

    def swapped_bytes(self, setting: Setting) -> int:
        return 0


def asked(setting: Setting = SETTING, machines: Machines = H200) -> tuple[Question, Row]:
    question = question_about(cast("Model", MadeUp()), setting, machines, mean_document_tokens=setting.row_tokens)
    return question, judged(question, setting)


def test_what_is_measured_stands_beside_what_is_predicted_for_the_same_step():
    question, row = asked()
    found = probed.compared(row, question, Probed(20 * GIB, 2.5))
    assert found["setting"] == asdict(replace(SETTING, accumulation=2))  # of 8
    assert found["measured"] == {"peak_bytes": 20 * GIB, "step_seconds": 2.5, "tokens_per_second": 2 * 8192 / 2.5}
    assert found["predicted"] == {"peak_bytes": 18 * GIB, "step_seconds": 2.0, "tokens_per_second": 8192.0}
    assert probed.lines_of(row, found) == [
        "Probed: full fine-tuning under single, micro-batch 2 x 4,096 tokens, activations kept",
        "peak memory: 20.00 GiB, predicted 18.00 (-10.0%); 21.2 of 139.8 GiB are needed: fits",
        "speed: 6,554 tokens/s, predicted 8,192 (+25%)",
    ]


@pytest.mark.parametrize(
    ("peak_gib", "verdict"),
    [(100.0, "fits"), (121.0, "fits"), (123.0, "tight"), (134.0, "tight"), (136.0, "does not fit")],
)
def test_verdict_is_that_of_the_measured_peak(peak_gib: float, verdict: str):
    question, row = asked()
    found = probed.compared(row, question, Probed(int(peak_gib * GIB), 1.0))
    assert found["verdict"] == verdict
    measured = replace(row.memory, parts={"weights": int(peak_gib * GIB)})
    assert found["needed_bytes"] == needed_bytes(measured, row.setting)
    assert verdict in "\n".join(probed.lines_of(row, found))


def test_nothing_is_said_of_memory_without_a_gpu():
    question, row = asked()
    found = probed.compared(row, question, Probed(None, 2.5))
    assert (found["measured"]["peak_bytes"], found["needed_bytes"], found["verdict"]) == (None, None, None)
    assert [line.split(":")[0] for line in probed.lines_of(row, found)] == ["Probed", "speed"]


def test_speed_of_an_unknown_card_is_measured_and_not_compared():
    question, row = asked(machines=parse_gpus("1x80GB"))
    found = probed.compared(row, question, Probed(20 * GIB, 2.5))
    assert found["predicted"] == {"peak_bytes": 18 * GIB, "step_seconds": None, "tokens_per_second": None}
    line = probed.lines_of(row, found)[-1]
    assert line.startswith("speed: 6,554 tokens/s; ")
    assert "%" not in line


def test_other_gpus_than_the_one_that_is_here_are_refused_in_a_sentence():
    question, row = asked()
    assert probed.row_to_probe((row,), question, Machines(H200.gpu, 8)) is row
    with pytest.raises(InputError, match="measures the H100 that is here"):
        probed.row_to_probe((row,), question, parse_gpus("1xH100"))


def test_first_row_that_fits_on_one_gpu_without_sharding_is_probed():
    question, row = asked()
    _, too_large = asked(replace(SETTING, micro_batch_size=32))
    offloaded = replace(row, setting=replace(SETTING, strategy="fsdp2_offload"))
    assert too_large.verdict == "does not fit"
    assert probed.row_to_probe((offloaded, too_large, row), question, H200) is row
    for rows in ((), (offloaded,), (too_large,)):
        with pytest.raises(InputError, match="ask about --gpus 1xH200"):
            probed.row_to_probe(rows, question, H200)


def test_probe_asks_for_the_steps_of_the_row_and_adds_to_json(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    question, row = asked()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    seen: list[Any] = []

    def probe(config: dict[str, Any], setting: Setting) -> Probed:
        seen.append((config, setting))
        return Probed(20 * GIB, 2.5)

    monkeypatch.setattr(plan_verb, "probe_in_child", probe)
    monkeypatch.setattr(plan_verb, "gpus_here", lambda: H200)
    extra: dict[str, Any] = {}
    said = plan_verb.Asked(question, str(tmp_path), None, ())
    lines = plan_verb._probe(said, cast("Any", answer_of_one(question, row)), extra)
    assert seen == [({"model_type": "llama"}, replace(SETTING, accumulation=2))]
    assert lines == probed.lines_of(row, extra["probe"])
    assert set(extra["probe"]) == {"setting", "measured", "predicted", "verdict", "needed_bytes"}


def answer_of_one(question: Question, row: Row) -> plan_verb.Plan:
    """An answer of one row."""
    return plan_verb.Plan(question, (row,), (), None)


def test_running_out_of_memory_is_a_sentence_with_the_largest_peak(monkeypatch: pytest.MonkeyPatch):
    def prepared(*_: object) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(probe_module, "_prepared", prepared)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 12 * GIB)
    with pytest.raises(InputError, match=r"rows of 4096 tokens ran out of memory at 12.0 GiB: .* --row-tokens"):
        probe_module.probe({}, SETTING)


@pytest.mark.slow
def test_steps_are_taken_by_the_recipes_own_pieces():
    """On the CPU, where time is measured and memory is not."""
    setting = Setting(
        row_tokens=32, adapter="lora", bits=4, rank=4, layout="packed", activation_checkpointing=True, accumulation=2
    )
    configs = json.loads((Path(__file__).parent / "model_configs.json").read_text())
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 300}
    config = configs["smollm2-135m"]["config"] | small | {"num_attention_heads": 4, "num_key_value_heads": 2}
    found = probe_in_child(config, setting)
    assert found.peak_bytes is None
    assert found.step_seconds > 0
