"""With ``--record-proofs``, what a run of the tests proves is written down: see benchmarks/proofs.py.

A matrix is recorded if its whole file was collected, none of its tests was left out, skipped or expected to fail, and
each passed.
"""

from collections import defaultdict

import pytest

from benchmarks import proofs


class Recorder:
    """A plugin of pytest that counts the points of each matrix, and which of them passed."""

    def __init__(self) -> None:
        self.collected: dict[str, set[str]] = defaultdict(set)
        self.passed: dict[str, set[str]] = defaultdict(set)
        self.failed: set[str] = set()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Before any is deselected. A single test that was asked for by its name is not a matrix."""
        whole = not any("::" in argument for argument in config.args)
        for item in items:
            matrix = item.path.stem
            if whole and matrix in proofs.MATRICES:
                self.collected[matrix].add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:  # in setting up or tearing down, too
            self.failed.add(report.nodeid)
        elif report.when == "call" and report.passed and not hasattr(report, "wasxfail"):
            self.passed[matrix_of(report.nodeid)].add(report.nodeid)

    def proven(self) -> dict[str, int]:
        """The matrices of which every point passed, and how many points that are."""
        return {
            matrix: len(points)
            for matrix, points in self.collected.items()
            if points == self.passed[matrix] and not points & self.failed
        }

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        proven = self.proven()
        for matrix, points in self.collected.items():
            if matrix in proven:
                proofs.write(matrix, len(points))
                terminalreporter.write_line(f"{matrix}: all {len(points)} points passed; recorded.")
            else:
                passed = len(self.passed[matrix] - self.failed)
                terminalreporter.write_line(f"{matrix}: {passed} of {len(points)} points passed; not recorded.")


def matrix_of(nodeid: str) -> str:
    """Name of a test's module: of ``tests/test_resume.py::test_a[b]``, ``test_resume``."""
    return nodeid.partition("::")[0].rpartition("/")[2].removesuffix(".py")
