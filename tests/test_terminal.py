"""What a model says cannot steer a person's terminal."""

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from finetune.cli.terminal import harmless, say


@given(st.text())
def test_no_control_character_is_left_but_tabs_and_ends_of_lines(text: str):
    left = harmless(text)
    assert not [each for each in left if each not in "\t\n" and (ord(each) < 32 or 127 <= ord(each) < 160)]


@given(st.text(st.characters(exclude_categories=["Cc"])))
def test_other_text_stays_as_it_is(text: str):
    assert harmless(f"{text}\n\t") == f"{text}\n\t"


@pytest.mark.parametrize(("is_terminal", "printed"), [(True, "a[2Jb"), (False, "a\x1b[2Jb")])
def test_a_pipe_is_given_what_was_said_and_a_terminal_what_is_harmless(
    is_terminal: bool, printed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    say("a\x1b[2Jb")
    assert capsys.readouterr().out == printed
