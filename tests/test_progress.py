"""A run is readable when its output goes into a file, whatever the environment asks of terminals."""

import math
import os
import pty
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import pictures
from finetune.run.screen import MOST_OF_COURSE, Screen
from finetune.run.sparkline import BLOCKS, Sparkline
from finetune.units import spoken

METRICS = {
    "loss": 1.25,
    "tokens_per_second": 1234.5,
    "grad_norm": 0.5,
    "learning_rate": 1e-4,
    "step_seconds": 2.0,
}


def test_output_that_is_no_terminal_gets_plain_lines_with_loss_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Screen(shown=True, total_steps=4, every=2) as screen:
        for step in range(1, 5):
            screen.step(METRICS | {"step": step, **({"eval_loss": 1.5} if step == 4 else {})})
    assert capsys.readouterr().out.splitlines() == [
        "step 2/4  loss 1.2500  lr 1.00e-04  grad norm 0.500  1,234 tokens/s  4.0 s left",
        "step 4/4  loss 1.2500  lr 1.00e-04  grad norm 0.500  1,234 tokens/s  0 s left",
        "step 4: held-out loss 1.5000",
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (4.24, "4.2 s"),
        (59.4, "59 s"),
        (59.6, "1 min"),
        (2572, "43 min"),
        (3599, "1 h 0 min"),
        (7805, "2 h 10 min"),
        (47.4 * 3600, "47 h 24 min"),
        (76 * 3600, "3 d 4 h"),
    ],
)
def test_durations_are_said_in_the_units_of_a_person(seconds: float, text: str):
    assert spoken(seconds) == text


def test_step_whose_gradient_overflowed_says_so(capsys: pytest.CaptureFixture[str]):
    with Screen(shown=True, total_steps=1, every=1) as screen:
        screen.step(METRICS | {"step": 1, "grad_norm": None})
    assert "grad norm overflow" in capsys.readouterr().out


def test_other_processes_print_nothing(capsys: pytest.CaptureFixture[str]):
    with Screen(shown=False, total_steps=1, every=1) as screen:
        screen.say("hello")
        screen.step(METRICS | {"step": 1})
        screen.answers([{"prompt": "q", "before": "a", "after": "b"}])
    assert capsys.readouterr().out == ""


def shown_at_the_end(columns: int, metrics: list[dict[str, Any]]) -> list[str]:
    """The lines that are left in a terminal, without their colours."""
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor() as pool:
        written = pool.submit(lambda: b"".join(iter(lambda: pictures.read(ours), b"")))
        with (
            os.fdopen(theirs, "w") as terminal,
            mock.patch("sys.stdout", terminal),
            mock.patch.dict("os.environ", TERM="xterm-256color", LINES="40", COLUMNS=str(columns)),
            Screen(shown=True, total_steps=2000, every=1) as screen,
        ):
            for line in metrics:
                screen.step(line)
        left = pictures.screen(written.result().decode())
    os.close(ours)
    return [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in left]


@pytest.mark.parametrize("columns", [80, 120])
def test_a_terminal_shows_the_course_of_the_loss_and_the_time_left_as_a_person_says_it(columns: int):
    lines = [METRICS | {"step": step, "loss": 4 / step} for step in range(1, 713)]
    bar, figures = shown_at_the_end(columns, lines)
    assert bar.split()[:2] == ["step", "712/2000"]
    assert bar.endswith(" 43 min left")  # 1,288 steps of 2 s
    before, course, after = re.split("([▁-█]+)", figures)
    assert (before, after) == ("loss 0.0056 ", "  lr 1.00e-04  grad norm 0.500  1,234 tokens/s")
    assert course[0] == "█"
    assert course[-1] == "▁"
    assert len(course) == min(MOST_OF_COURSE, columns - len(before + after))
    assert max(map(len, (bar, figures))) <= columns


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=1500), st.integers(1, 40))
def test_a_course_is_as_wide_as_asked_and_as_high_as_its_blocks(values: list[float], width: int):
    course = Sparkline()
    for value in values:
        course.add(value)
    text = course.text(width)
    assert len(text) <= width
    assert len(text) == min(width, len(values)) or len(values) > Sparkline.MOST // 2
    assert set(text) <= set(BLOCKS)
    assert len(course.means) < Sparkline.MOST


def test_a_course_falls_where_its_values_do_and_leaves_out_what_is_not_finite():
    course = Sparkline()
    for value in (8, 6, 4, None, 2, 2, math.nan, 2, 0, 0):
        course.add(value)
    assert course.text(4) == "█▄▃▁"
    assert Sparkline().text(4) == ""
