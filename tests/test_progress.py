"""A run is readable when its output goes into a file, whatever the environment asks of terminals."""

import pytest

from finetune.run.screen import Screen
from finetune.units import spoken

METRICS = {"loss": 1.25, "tokens_per_second": 1234.5, "grad_norm": 0.5, "step_seconds": 2.0}


def test_output_that_is_no_terminal_gets_plain_lines_with_loss_speed_and_time_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Screen(shown=True, total_steps=4, every=2) as screen:
        for step in range(1, 5):
            screen.step(METRICS | {"step": step, **({"eval_loss": 1.5} if step == 4 else {})})
    assert capsys.readouterr().out.splitlines() == [
        "step 2/4  loss 1.2500  1,234 tokens/s  grad norm 0.500  4.0 s left",
        "step 4/4  loss 1.2500  1,234 tokens/s  grad norm 0.500  0 s left",
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
        screen.answers({"q": "a"}, {"q": "b"})
    assert capsys.readouterr().out == ""
