"""A run of three steps, a browser, and viewers of real servers on loopback."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from agentrl.view.run import open_run
from agentrl.view.viewer import Viewer
from tests.view.made import hostile, make_run
from tests.view.served import ARGUMENTS, CHROMIUM


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, None]:
    """Under .ci/run, which installs a chromium where it can, no test of the browser may be skipped."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    if report.skipped and "browser" in getattr(item, "fixturenames", ()) and os.environ.get("AGENTRL_CI") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped under .ci/run: {report.longrepr}"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("no chromium is installed: apt-get install chromium")
    with sync_playwright() as playwright:
        yield (browser := playwright.chromium.launch(executable_path=str(CHROMIUM), args=ARGUMENTS.split()))
        browser.close()


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "made")


@pytest.fixture(scope="session")
def hostile_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "hostile", steps=2, groups=1, more=hostile())


@pytest.fixture
def viewer(run: Path) -> Viewer:
    return Viewer([open_run(str(run))])
