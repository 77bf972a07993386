"""A row names files below a folder that it is given, and no others."""

from __future__ import annotations

import pytest

from agentrl.system.paths import LONGEST, file_below

LONG = "/".join(["a" * 255] * 4)
assert len(LONG) == LONGEST - 1


@pytest.mark.parametrize(
    ("path", "plain"),
    [("a", "a"), ("./a//b/", "a/b"), ("a b/..c", "a b/..c"), ("…/x", "…/x"), (LONG, LONG), ("é" * 127, "é" * 127)],
)
def test_a_file_below(path: str, plain: str) -> None:
    assert file_below(path) == plain


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "./",
        "/",
        "/etc/passwd",
        "//a",
        "..",
        "../a",
        "a/../../b",
        "a/..",
        "a\0b",
        f"{LONG}aa",
        "a" * 256,
        "é" * 128,
        None,
        3,
        b"a",
    ],
)
def test_no_file_below(path: object) -> None:
    assert file_below(path) is None
