"""Runs pytest and records which test comes through which line of a folder: `recorded.py RECORD FOLDER WORD ...`."""

from __future__ import annotations

import sys
from collections.abc import Generator

import coverage
import pytest

record, folder, *words = sys.argv[1:]
recorder = coverage.Coverage(data_file=record, source=[folder])


class Contexts:
    """Plugin that names the test for the lines of its set-up, call and tear-down."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        """Switch to the test's name."""
        recorder.switch_context(item.nodeid)
        return (yield)


with recorder.collect():
    status = pytest.main(words, plugins=[Contexts()])
recorder.save()
sys.exit(status)
