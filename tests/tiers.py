"""Two tiers of tests: `make test` runs a seeded slice of every long family, `make test-all` runs everything.

`@pytest.mark.slice(keep, kind)` makes a family of a parametrized test's cases (or, in `pytestmark`, of a whole file's
tests): `make test` runs `keep` of them, drawn by `--slice-seed`, so that the same seed draws the same tests. `--whole`
runs all of them, and so does naming a test with `::`.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence

import pytest

KINDS = {
    "matrix": "the same check for many models, formats or arrangements",
    "kill": "processes that are killed, disks that fill up",
    "soak": "many rounds of the same",
    "long run": "a training to its end",
    "engine": "servers of another engine",
    "browser": "pages in a real browser",
    "hostile": "programs and texts that attack",
    "documents": "commands and examples of the documents",
    "cluster": "real Ray, several processes",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("tiers")
    group.addoption("--whole", action="store_true", help="run all tests, also those that `slice` marks leave out")
    group.addoption("--slice-seed", default="0", help="draws the tests of a family that run without --whole")


def pytest_report_header(config: pytest.Config) -> str:
    if takes_all(config):
        return "tests: all"
    return f"tests: a slice, --slice-seed={config.getoption('slice_seed')}; all of them: make test-all, or --whole"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    families = collect_families(items)
    if takes_all(config):
        return
    left_out: set[str] = set()
    for name, (keep, _, members) in families.items():
        left_out.update(set(members) - draw(members, keep, f"{config.getoption('slice_seed')} {name}"))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


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
    """`keep` of a family's tests, the same ones for the same seed whatever order they were collected in."""
    return set(random.Random(seed).sample(sorted(members), min(keep, len(members))))


def kinds_left_out(items: Sequence[pytest.Item]) -> dict[str, int]:
    """How many tests of each kind only `make test-all` runs."""
    counts: dict[str, int] = defaultdict(int)
    for keep, kind, members in collect_families(items).values():
        counts[kind] += max(len(members) - keep, 0)
    return dict(counts)
