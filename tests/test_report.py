"""A page tells what runs wrote: each figure where it belongs, whatever state the run is in, and nothing runs in it."""

import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from finetune.cli.commands import main
from finetune.output.output_folder import PICTURE, REPORT
from finetune.output.run_reading import line_of
from finetune.report import pages
from finetune.report.charts import MOST_POINTS, Point, charts_of, smoothed, thinned
from finetune.report.drawn import drawn, texts, ticks
from finetune.report.memory_bars import memory_bars
from finetune.report.run_read import RunRead, read_runs
from finetune.report.tables import differences, state, summary
from finetune.units import GIB

SCRIPT = "<script>alert('x')</script>"


def metrics(steps: int, **further: Any) -> list[dict[str, Any]]:
    """Lines of a run whose loss is 4 / step."""
    return [
        {
            "step": step,
            "loss": 4 / step,
            "tokens": 100,
            "total_tokens": 128,
            "grad_norm": 1 + step % 3,
            "learning_rate": 1e-4 * (1 - step / (steps + 1)),
            "step_seconds": 0.5,
            "tokens_per_second": 256.0,
            **further,
            **({"eval_loss": 5 / step} if step % 4 == 0 else {}),
        }
        for step in range(1, steps + 1)
    ]


def record(**changes: Any) -> dict[str, Any]:
    """What run.yaml says of a finished run, as far as the page shows it."""
    return {
        "config": {
            "model": {"path": "tiny"},
            "quantization": {"bits": "none"},
            "adapter": {"type": "lora", "rank": 8},
            "train": {"output_dir": "somewhere", "learning_rate": 1e-4, "seed": 0},
        },
        "strategy": {"name": "fsdp2", "processes": 2, "precision": "bf16"},
        "hardware": {"gpus": [], "cpus": 2},
        "packages": {"torch": "2.13.0"},
        "steps": 8,
        "plan": {"peak_memory_gib": 3.0, "parts_gib": {"weights": 2.0, "optimizer": 1.0}},
        "data_figures": {
            "train": {
                "rows": 4,
                "tokens": 40,
                "trained_tokens": 12,
                "longest": 15,
                "truncated": 0,
                "dropped": 0,
                "rejected": 1,
                "formats": ["messages"],
                "lengths": {"up_to": [10, 20], "rows": [3, 1]},
            }
        },
        "eval_loss": {"before": 6.0, "after": 0.625},
        "measured": {"peak_memory_gib": None, "tokens_per_second": 256.0},
        "answers": [{"prompt": "Who?", "before": SCRIPT, "after": "Jonas & Ada"}],
        "held_bytes": [{"weights": GIB, "masters": 0, "optimizer": GIB // 2}] * 2,
        **changes,
    }


def write(folder: Path, lines: list[dict[str, Any]], told: dict[str, Any] | None, *, end: str = "") -> Path:
    (folder / "final").mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)
    if told is not None:
        (folder / "run.yaml").write_text(yaml.safe_dump(told, sort_keys=False))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write(tmp_path / "run", metrics(8), record())


class Elements(HTMLParser):
    """The elements of a page, whose tags close one another, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_last_step_without_a_finite_loss_is_not_told_by_an_earlier_one(tmp_path: Path):
    lines = metrics(4)
    lines[-1]["loss"] = None
    ended = write(tmp_path / "ended", lines, record())
    whole = write(tmp_path / "whole", metrics(4), record())
    rows = {name: told for name, *told in summary(read_runs([whole, ended])).rows}
    assert rows["loss of the last step"] == ["1.0000", "not finite"]


def test_page_shows_data_as_text_and_loads_and_runs_nothing(run: Path):
    told = record(config={"model": {"path": SCRIPT}}, resumed=[])
    write(run.parent / "<b>named", metrics(3), told)
    page = pages.to_html(read_runs([run, run.parent / "<b>named"]))
    elements = Elements(page)
    assert elements.text.count(SCRIPT) >= 3  # an answer, and a model's path
    assert "<b>named" in elements.text
    assert not {"script", "b", "link", "img", "iframe", "a"} & {tag for tag, _ in elements.found}
    assert not [
        name for _, attributes in elements.found for name in attributes if name.startswith(("on", "src", "href"))
    ]
    assert "url(" not in page
    assert "@import" not in page


def values_of(path: str, up: list[Any]) -> list[float]:
    """The values that a path is drawn through, by the numbers at its axis."""
    (low, lowest), (high, highest) = ((tick.at, float(tick.text)) for tick in (up[0], up[-1]))
    heights = [float(place.split()[1]) for place in re.split(" ?[ML]", path) if place]
    return [lowest + (height - low) / (high - low) * (highest - lowest) for height in heights]


def test_lines_are_drawn_through_the_values_of_the_run(run: Path):
    runs = read_runs([run])
    loss, grad_norm = (drawn(chart, runs) for chart in charts_of(runs)[:2])
    trained, held_out = loss.strokes
    assert (loss.title, trained.style, held_out.style) == ("Loss", "run0 training", "run0 held-out")
    assert values_of(trained.path, loss.up) == pytest.approx([4 / step for step in range(1, 9)], abs=0.03)
    assert values_of(held_out.path, loss.up) == pytest.approx([6.0, 5 / 4, 5 / 8], abs=0.03)
    assert values_of(grad_norm.strokes[0].path, grad_norm.up) == pytest.approx([2, 3, 1, 2, 3, 1, 2, 3], abs=0.02)


def test_every_figure_of_a_recipe_has_a_chart_with_its_held_out_course(tmp_path: Path):
    lines = metrics(8, reward_margin=0.5, accuracy=0.75)
    lines[-1] |= {"eval_accuracy": 0.5, "eval_bits_per_byte": 1.5, "mfu": 0.4, "save_stall_seconds": 0.1}
    charts = charts_of(read_runs([write(tmp_path / "run", lines, record())]))
    assert [chart.key for chart in charts] == [
        *("loss", "grad_norm", "learning_rate", "tokens_per_second", "mfu"),
        *("reward_margin", "accuracy", "bits_per_byte"),
    ]
    assert {line.kind: line.points for line in charts[6].lines}["held-out"] == [(8, 0.5)]


def test_a_value_that_is_not_finite_interrupts_its_line(tmp_path: Path):
    lines = metrics(5)
    lines[2]["loss"] = None
    lines[2] |= {"not_finite": "loss", "bad_steps": 1, "rows": ["a:1"]}
    runs = read_runs([write(tmp_path / "run", lines, {})])
    trained = drawn(charts_of(runs)[0], runs).strokes[0]
    assert trained.path.count("M") == 2
    assert "1 step was left out" in pages.to_html(runs)


def test_json_has_no_numbers_that_json_has_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    lines = metrics(5)
    lines[3]["eval_loss"] = math.nan
    assert json.loads(line_of(lines[3]), parse_constant=pytest.fail)["eval_loss"] is None
    run = write(tmp_path / "run", lines, record(eval_loss={"before": 2.0, "after": math.inf}))
    assert main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert told["runs"][0]["eval_loss"] == {"before": 2.0, "after": None}


@pytest.mark.parametrize(
    ("lines", "end", "said"),
    [
        (metrics(3), '{"step": 4, "lo', "3 of 8 steps"),
        ([], "", "no step is complete yet"),
        (metrics(3), "\x00\x00\n", "1 line of metrics.jsonl cannot be read"),
    ],
)
def test_a_run_at_work_or_damaged_has_a_page(tmp_path: Path, lines: list[dict[str, Any]], end: str, said: str):
    unfinished = record()
    for key in ("eval_loss", "measured", "answers", "held_bytes"):
        del unfinished[key]
    run = write(tmp_path / "run", lines, unfinished, end=end)
    (run / "final").rmdir()
    assert said in pages.to_html(read_runs([run]))


def test_a_run_whose_record_is_lost_has_a_page(tmp_path: Path):
    runs = read_runs([write(tmp_path / "run", metrics(3), None)])
    assert "run.yaml is missing" in pages.to_html(runs)
    assert state(runs[0]) == "3 steps"


def test_folders_without_a_run_are_refused_by_name(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "other").mkdir()
    assert main(["report", str(run), str(tmp_path / "other"), str(tmp_path / "none")]) == 2
    told = capsys.readouterr().err.splitlines()
    assert [line.split(" has neither")[0] for line in told] == [f"error: {tmp_path}/other", f"{tmp_path}/none"]
    assert not (run / REPORT).exists()


def test_only_what_differs_is_listed_of_two_configurations(run: Path, tmp_path: Path):
    other = record(packages={"torch": "2.12.0"})
    other["config"]["train"] |= {"output_dir": "elsewhere", "learning_rate": 3e-4}
    other["config"]["data"] = {"packing": True}
    runs = read_runs([run, write(tmp_path / "other", metrics(8), other)])
    assert differences(runs).rows == [
        ["train.learning_rate", "0.0001", "0.0003"],
        ["torch", "2.13.0", "2.12.0"],
        ["data.packing", "–", "True"],
    ]
    assert differences([runs[0], runs[0]]).rows == []


def test_resumptions_are_marked_where_they_were(tmp_path: Path):
    told = record(resumed=[{"after_step": 4, "strategy": "ddp", "processes": 2}])
    runs = read_runs([write(tmp_path / "run", metrics(7), told)])
    ((at, _, what),) = drawn(charts_of(runs)[1], runs).marks
    assert at == pytest.approx((58 + 548) / 2, abs=0.1)  # step 4 of 1 to 7, between the margins
    assert what == "run: resumed after step 4 under ddp on 2 processes"
    assert what in pages.to_html(runs)


def test_bars_are_as_long_as_the_bytes(run: Path):
    predicted, first, second = memory_bars(read_runs([run])[0])
    assert [part.share for part in predicted.parts] == pytest.approx([2 / 3, 1 / 3])
    assert [(part.kind, part.at) for part in first.parts] == [("weights", 0.0), ("optimizer", pytest.approx(1 / 3))]
    assert (first.total, second.name) == ("1.5 GiB", "process 1, between steps")


def test_json_has_the_figures_that_are_drawn(run: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["report", str(run), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (loss,) = [chart for chart in told["charts"] if chart["key"] == "loss"]
    assert loss["lines"][0]["points"] == [[step, 4 / step] for step in range(1, 9)]
    assert told["summary"]["state"] == {"run": "finished, 8 steps"}
    assert not (run / REPORT).exists()


def test_picture_has_the_colour_of_each_run(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    image = pytest.importorskip("matplotlib.image")
    page = tmp_path / "both.html"
    other = write(tmp_path / "other", metrics(6), record())
    assert main(["report", str(run), str(other), "--output", str(page)]) == 0
    assert capsys.readouterr().out == f"report: {page} and both.png\n"
    pixels = image.imread(page.with_suffix(".png"))[..., :3].reshape(-1, 3)
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):
        assert (np.abs(pixels - np.array(colour) / 255).max(axis=1) < 0.02).sum() > 500
    assert Elements(page.read_text()).text.count("other") >= 2


def test_without_matplotlib_there_is_a_page_and_a_line_that_names_the_command(
    run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert "`pip install matplotlib`" in pages.of_finished_run(run)
    assert (run / REPORT).exists()
    assert not (run / PICTURE).exists()


def test_a_report_that_cannot_be_drawn_costs_a_finished_run_a_line(run: Path, monkeypatch: pytest.MonkeyPatch):
    def fails(*_: object) -> bool:
        raise ValueError("bad style\nin matplotlibrc")

    monkeypatch.setattr("finetune.report.plotted.draw", fails)
    assert pages.of_finished_run(run).startswith("no report was written (bad style); the result of the run is complete")


def test_a_report_that_cannot_be_written_costs_a_finished_run_a_line(run: Path, capsys: pytest.CaptureFixture[str]):
    (run / REPORT).mkdir()
    assert pages.of_finished_run(run) == (
        "no report was written (Is a directory); the result of the run is complete, and "
        f"`finetune report {run}` tries again"
    )
    assert main(["report", str(run)]) == 2
    assert "choose another file with --output" in capsys.readouterr().err


@given(st.floats(-1e6, 1e6), st.floats(1e-9, 1e6))
def test_numbers_of_an_axis_are_few_and_evenly_spaced_around_the_values_and_can_be_told_apart(low: float, reach: float):
    high = low + max(reach, abs(low) * 1e-3)
    found = ticks(low, high)
    assert 2 <= len(found) <= 9
    assert found[0] <= low + (high - low) * 1e-6
    assert found[-1] >= high - (high - low) * 1e-6
    gaps = [after - before for before, after in pairwise(found)]
    assert max(gaps) == pytest.approx(min(gaps), rel=1e-6)
    assert len(set(texts(found))) == len(found)


def test_numbers_of_axes_read_as_people_write_them():
    assert texts(ticks(0.93, 4.2)) == ["0", "1", "2", "3", "4", "5"]
    assert texts(ticks(0, 0.9)) == ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert texts(ticks(0, 2e-4)) == ["0", "5.0e-05", "1.0e-04", "1.5e-04", "2.0e-04"]
    assert texts(ticks(1, 43000)) == ["0", "10k", "20k", "30k", "40k", "50k"]
    assert texts(ticks(3, 3)) == ["1", "2", "3", "4", "5"]


@given(st.lists(st.one_of(st.floats(-1e9, 1e9), st.just(math.nan)), min_size=1, max_size=5000))
def test_a_long_course_keeps_its_ends_and_extremes_in_few_points(values: list[float]):
    course: list[Point] = list(enumerate(values))
    found = thinned(course, most=100)
    assert len(found) <= max(100, min(len(course), 100))
    assert (found[0][0], found[-1][0]) == (0, len(course) - 1)
    assert [step for step, _ in found] == sorted({step for step, _ in found})
    if any(map(math.isfinite, values)):
        of_all, of_few = ([y for _, y in points if math.isfinite(y)] for points in (course, found))
        assert (min(of_few), max(of_few)) == (min(of_all), max(of_all))


def test_a_mean_over_a_long_course_is_that_of_numpy():
    values = np.random.default_rng(0).normal(size=400)
    course = list(enumerate(values.tolist()))
    found = [value for _, value in smoothed(course, 8)]
    assert found[8:-8] == pytest.approx(np.convolve(values, np.ones(17) / 17, mode="valid"))
    assert found[0] == pytest.approx(values[:9].mean())


def test_a_mean_forgets_a_huge_value_behind_it():
    course = [(step, 1e300 if step == 40 else 1.0) for step in range(100)]
    assert [value for step, value in smoothed(course, 2) if not 38 <= step <= 42] == [1.0] * 95


def test_a_run_whose_folder_has_the_signs_of_a_formula_is_drawn(tmp_path: Path):
    folder = write(tmp_path / "a $x^$ b", metrics(3), record())
    assert main(["report", str(folder)]) == 0


def test_a_long_run_has_a_small_page(tmp_path: Path):
    runs = [RunRead("long", record(), metrics(20_000), 0, True)]
    charts = charts_of(runs)
    assert [line.kind for line in charts[0].lines] == ["each", "mean", "held-out"]
    assert all(len(line.points) <= MOST_POINTS for chart in charts for line in chart.lines)
    assert len(pages.to_html(runs)) < 300_000


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("scheme", "brightness"), [(0, range(60)), (1, range(200, 256))], ids=["dark", "light"])
def test_a_browser_draws_the_curves_in_the_colours_of_a_dark_and_of_a_light_screen(
    run: Path, tmp_path: Path, scheme: int, brightness: range
):
    pages.of_finished_run(run)
    how = ["--headless", "--no-sandbox", "--disable-gpu", f"--blink-settings=preferredColorScheme={scheme}"]
    how += [
        "--window-size=1000,1400",
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--screenshot={tmp_path / 'page.png'}",
    ]
    subprocess.run([str(CHROMIUM), *how, (run / REPORT).as_uri()], check=True, capture_output=True, timeout=60)
    with Image.open(tmp_path / "page.png") as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert pixels.shape == (1400, 1000, 3)
    (background,), count = np.unique(pixels[-1:, -1], axis=0), len(pixels[0]) * len(pixels)
    assert int(background.mean()) in brightness
    coloured = np.ptp(pixels, axis=2) > 60  # of curves and bars; text and lines are grey
    assert 0.001 < coloured.sum() / count < 0.3


def test_a_run_that_is_named_twice_is_read_once(tmp_path: Path):
    run = write(tmp_path / "run", metrics(3), record())
    other = write(tmp_path / "other", metrics(3), record())
    assert [each.name for each in read_runs([run, other, tmp_path / "other" / ".." / "run"])] == ["run", "other"]
