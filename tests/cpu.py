"""A table of CPU-seconds by folder and by file: `pytest --cpu`, which `.ci/run` gives to `make test`.

A test's CPU-seconds are those of its process and of child processes that ended meanwhile and were waited for; fixtures
count for the first test that needs them. A clock would count what else runs on the machine.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator, Mapping
from pathlib import PurePath

import pytest

FILES = 25
"""Files that the table shows, those with most CPU-seconds."""
PROPERTY = "cpu_seconds"


def cpu_seconds() -> float:
    """CPU-seconds of this process and of its children that have been waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class CPUTable:
    """Plugin that measures each test, in whichever process it runs, and prints the table at the end."""

    def __init__(self) -> None:
        self.began = 0.0
        self.by_file = defaultdict[str, float](float)

    def pytest_runtest_logstart(self) -> None:
        self.began = cpu_seconds()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, None]:
        outcome = yield
        report: pytest.TestReport = outcome.get_result()
        if report.when == "teardown":
            report.user_properties = [*report.user_properties, (PROPERTY, cpu_seconds() - self.began)]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            measured = dict(report.user_properties).get(PROPERTY)
            self.by_file[report.location[0]] += measured if isinstance(measured, float) else 0.0

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("CPU-seconds")
        for line in table(self.by_file):
            terminalreporter.write_line(line)


def table(by_file: Mapping[str, float]) -> list[str]:
    """Lines with the sum, each folder, and the files with most, largest first."""
    by_folder = defaultdict[str, float](float)
    for file, seconds in by_file.items():
        by_folder["/".join(PurePath(file).parts[:2])] += seconds

    def most(sums: Mapping[str, float]) -> list[str]:
        return [f"{sums[name]:8.1f} {name}" for name in sorted(sums, key=lambda name: -sums[name])]

    return [f"{sum(by_file.values()):8.1f} all", *most(by_folder), "", *most(by_file)[:FILES]]
