"""What every test needs: one thread a process, no network, and the shared data where it is present."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.again import keep_status
from tests.cpu import CPUTable
from tests.runs import data_dir, policy_dir, reward_file, small_run
from tests.tiers import (
    pytest_addoption,
    pytest_collection_modifyitems,
    pytest_ignore_collect,
    pytest_report_header,
)
from tests.wheel import agentrl_wheel, installed, run_wheel, shared_folder

__all__ = ["pytest_addoption", "pytest_collection_modifyitems", "pytest_ignore_collect", "pytest_report_header"]
__all__ += ["data_dir", "policy_dir", "reward_file", "small_run"]  # fixtures
__all__ += ["agentrl_wheel", "installed", "run_wheel", "shared_folder"]

# Before torch is imported by any test: the test machine has two cores, and spinning OpenMP threads would eat them.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    MPLBACKEND="Agg",
    RAY_worker_niceness="0",  # for tests that start Ray themselves
)

# No test depends on the machine's speed.
settings.register_profile("agentrl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("agentrl")

PROJECT = Path(__file__).resolve().parent.parent
# An assertion in a module of helpers tells its values, as one in a test does.
pytest.register_assert_rewrite(*({f"tests.{path.stem}" for path in Path(__file__).parent.iterdir()} - set(sys.modules)))
SHARED = next((path for path in (PROJECT.parent / "shared", PROJECT / "shared") if (path / "data").is_dir()), None)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("cpu"):
        config.pluginmanager.register(CPUTable())


def import_share(config: pytest.Config) -> None:
    """Import first a share of the test files, another one in each process that shares the tests.

    All processes import all files, and the first to do so rewrites a file's assertions: half of the work of collecting,
    which in a new checkout each of them would do at the same time in the same order.
    """
    sharing: dict[str, Any] | None = getattr(config, "workerinput", None)
    if sharing is None or config.args != config.getini("testpaths"):
        return
    left_out = config.getini("norecursedirs")
    names = [file.relative_to(PROJECT) for file in sorted(PROJECT.glob("tests/**/test_*.py"))]
    names = [name for name in names if not any(str(name).startswith(f"{folder}/") for folder in left_out)]
    for name in names[int(sharing["workerid"].removeprefix("gw")) :: sharing["workercount"]]:
        with suppress(Exception, pytest.skip.Exception):  # said when the file is collected
            import_module(".".join(name.with_suffix("").parts))


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Generator[None, object, object]:
    """Leave what is imported for the tests out of later collections: a full one would visit it at each training."""
    gc.disable()  # collecting makes next to no garbage
    try:
        import_share(session.config)
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    keep_status(session, exitstatus)


@pytest.fixture
def thawed() -> Iterator[None]:
    """Full collections visit everything, as in a new process."""
    gc.unfreeze()
    yield
    gc.freeze()


@pytest.fixture
def sglang_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang is installed, whatever this machine has: a package that can be found, and fails when it is imported."""
    package = tmp_path / "site-packages" / "sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('SGLang was imported')\n")
    monkeypatch.syspath_prepend(str(package.parent))


@pytest.fixture
def sglang_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang is not installed: None in sys.modules is how Python itself marks a module that is not to be found."""
    monkeypatch.setitem(sys.modules, "sglang", None)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """`../shared`, with real data sets under `data/`, that is not part of the project; skips the test where absent."""
    if SHARED is None:
        pytest.skip(f"no shared/data folder beside the checkout {PROJECT}: this test reads real data from there")
    return SHARED


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, None]:
    """Under .ci/run a test that reads the shared data may not be skipped while the data is there."""
    outcome = yield
    report: pytest.TestReport = outcome.get_result()
    reads_shared = "shared_data" in getattr(item, "fixturenames", ())
    if report.skipped and reads_shared and SHARED is not None and os.environ.get("AGENTRL_CI") == "1":
        report.outcome = "failed"
        report.longrepr = f"skipped although {SHARED} is there: {report.longrepr}"
