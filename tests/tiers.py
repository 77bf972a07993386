"""Two tiers of tests: `make test` runs a seeded slice of every long family, `make test-all` runs everything.

`@pytest.mark.slice(keep, kind)` makes a family of a parametrized test's cases (or, in `pytestmark`, of a whole file's
tests): `make test` runs `keep` of them, drawn by `--slice-seed`, so that the same seed draws the same tests. `--whole`
runs all of them, and so does naming a test with `::`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
KINDS = {
    "matrix": "the same check for many models, formats or arrangements",
    "kill": "processes that are killed, disks that fill up",
    "soak": "many rounds of the same",
    "long run": "a training to its end",
    "hostile": "programs and texts that attack",
    "documents": "commands and examples of the documents",
    "cluster": "real Ray, several processes",
}


FAST = ("test_structure.py", "structure", "algorithms", "trajectory", "optim")
"""What `-m fast` runs, of this folder: the mathematics and the record, in under a minute on two cores."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--whole", action="store_true", help="run all tests, also those that `slice` marks leave out")
    group.addoption("--families", action="store_true", help="with --collect-only -q: print them as a table")
    group.addoption("--cpu", action="store_true", help="print CPU-seconds by folder and by file")
    group.addoption("--slice-seed", default="0", help="draws the tests of a family that run without --whole")
    default = TESTS.parent / ".venv-sglang" / "bin" / "python"
    group.addoption("--sglang-python", default=default, help="SGLang's interpreter, for runs over both softwares")


def pytest_report_header(config: pytest.Config) -> str:
    if takes_all(config):
        return "tests: all"
    return f"tests: a slice, --slice-seed={config.getoption('slice_seed')}; all of them: make test-all, or --whole"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no other tests for `-m fast`: collecting all takes longer than running these."""
    if config.getoption("markexpr") == "fast" and collection_path.parent == TESTS:
        return collection_path.name not in FAST or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS in item.path.parents and item.path.relative_to(TESTS).parts[0] in FAST:
            item.add_marker("fast")
    families = collect_families(items)
    if config.getoption("families"):
        print(table(items))
    longest_first(items)
    if takes_all(config):
        return
    left_out: set[str] = set()
    for keep, _, members in families.values():
        left_out.update(set(members) - draw(members, keep, config.getoption("slice_seed")))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def longest_first(items: list[pytest.Item]) -> None:
    """Sort by file: those with the largest `timeout` marks first, so that no long one is left to a single process."""
    limits: dict[object, float] = defaultdict(float)
    for item in items:
        mark = item.get_closest_marker("timeout")
        limits[item.path] = max(limits[item.path], mark.args[0] if mark is not None else 0.0)
    items.sort(key=lambda item: -limits[item.path])


def takes_all(config: pytest.Config) -> bool:
    """Whether this run leaves nothing out: --whole, or a test that is named."""
    return bool(config.getoption("whole")) or any("::" in argument for argument in config.args)


def collect_families(items: Sequence[pytest.Item]) -> dict[str, tuple[int, str, list[str]]]:
    """{family: (tests that `make test` keeps, kind, ids of all)}. Raises UsageError for a mark that is wrong."""
    families: dict[str, tuple[int, str, list[str]]] = {}
    for item in items:
        for node, mark in item.iter_markers_with_node("slice"):
            match mark.args:
                case (int(keep), str(kind)) if kind in KINDS and keep >= 0 and not mark.kwargs:
                    # A mark on a function shows at each of its cases.
                    name = item.nodeid.partition("[")[0] if node is item else node.nodeid
                    families.setdefault(name, (keep, kind, []))[2].append(item.nodeid)
                case _:
                    raise pytest.UsageError(f"{item.nodeid}: want slice(keep, kind), kind one of {sorted(KINDS)}")
            break  # the closest mark holds
    return families


def draw(members: Sequence[str], keep: int, seed: str) -> set[str]:
    """`keep` of a family's tests, the same ones for the same seed whatever order they were collected in.

    Families of the same size draw the same places, so that those over one fixture's parameters share its servers.
    """
    return set(random.Random(seed).sample(sorted(members), min(keep, len(members))))


def table(items: Sequence[pytest.Item]) -> str:
    """A Markdown table of the families of which `make test` leaves something out."""
    families = sorted(collect_families(items).items())
    lines = ["| family | kind | in `make test` | in `make test-all` |", "|---|---|---|---|"]
    lines += [
        f"| `{name.removeprefix('tests/')}` | {kind} | {keep or 'none'} | {len(members)} |"
        for name, (keep, kind, members) in families
        if keep < len(members)
    ]
    return "\n".join(lines)
