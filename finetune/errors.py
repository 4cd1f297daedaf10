"""Errors for users: input to correct, a run that stopped, a run that was interrupted."""

from collections.abc import Sequence


class InputError(ValueError):
    """One or more problems, each a sentence: what was seen, what is allowed, what to do.

    The command line prints the sentences without a traceback and exits with code 2; from Python
    it is an ordinary ``ValueError``.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


def refuse_if_any(problems: Sequence[str]) -> None:
    """Raise all problems at once, so that a user can fix a configuration in one pass.

    Raises:
        InputError: if there is at least one problem.
    """
    if problems:
        raise InputError(problems)


class BadRow(ValueError):
    """A row of a data file that cannot be trained on; the message is the reason, a clause without a full stop."""


class RunStopped(RuntimeError):
    """A run that cannot continue although its input was accepted: what happened, where, and what to do."""


class RunInterrupted(RunStopped):
    """A run that was interrupted and can be resumed: after which step, and how."""


def first_line(error: BaseException) -> str:
    """The first line of another library's message as a clause; the error's name where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200].rstrip(".")
