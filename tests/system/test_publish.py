from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import TrainingError
from agentrl.system.publish import is_disk_full, published
from tests.naming import naming
from tests.small_disk import small_disk_in


def test_the_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "made" / "a.txt"
    with published(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
    assert path.read_text() == "new"
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("error", [ValueError("bug"), KeyboardInterrupt(), PermissionError(13, "Permission denied")])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(type(error)), published(path) as temporary:
        temporary.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


KILL_BEFORE_EACH_OPERATION = """
import json, os, signal, sys
from pathlib import Path
from agentrl.system.publish import published_directory

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}


def fill(path, text, operation=0):
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if operation and event in EVENTS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    with published_directory(path) as partial:
        for name in ("a", "b"):
            (partial / name).write_text(text)


found = []
for operation in range(1, 100):
    path = Path(sys.argv[1], str(operation), "policy")
    fill(path, "old")
    child = os.fork()
    if not child:
        fill(path, "new", operation)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    there = [(path / name).read_text() for name in ("a", "b")] if path.exists() else []
    fill(path, "next")
    found.append([there, sorted(one.name for one in path.parent.iterdir())])
    if status == 0:
        break
print(json.dumps(found))
"""


def test_a_killed_replacement_of_a_folder_leaves_one_of_the_two_whole(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", KILL_BEFORE_EACH_OPERATION, str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) > 8
    order = [["old", "old"], [], ["new", "new"]]
    states = [there for there, _ in found]
    assert states == sorted(states, key=order.index)
    assert {tuple(left) for _, left in found} == {("policy",)}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    with small_disk_in(tmp_path, "64k") as mount:
        yield mount


def test_a_full_disk_is_one_clear_error(small_disk: Path) -> None:
    path = small_disk / "a.txt"
    path.write_text("old")
    with (
        naming(TrainingError, "a.txt"),
        published(path) as temporary,
    ):
        temporary.write_bytes(b"x" * 100_000)
    assert path.read_text() == "old"
    assert list(small_disk.iterdir()) == [path]


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(28, "No space left on device"), True),
        (OSError(122, "Disk quota exceeded"), True),
        (OSError(13, "Permission denied"), False),
        (RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (RuntimeError("shape mismatch"), False),
    ],
)
def test_what_counts_as_a_full_disk(error: Exception, full: bool) -> None:
    assert is_disk_full(error) is full
