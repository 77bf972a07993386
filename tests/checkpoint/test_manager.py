from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentrl.checkpoint import manifest as sealed
from agentrl.checkpoint.manager import CheckpointManager
from agentrl.errors import CheckpointError
from tests.naming import Names, assert_names, naming
from tests.small_disk import small_disk_in

WEIGHTS = Path("policy", "weights.bin")


def filled(text: str) -> dict[str, Callable[[Path], None]]:
    def write_policy(dir: Path) -> None:
        (dir / "weights.bin").write_text(text * 1000)

    def write_critic(dir: Path) -> None:
        (dir / "deep").mkdir()
        (dir / "deep" / "weights.bin").write_text(text)

    return {"policy": write_policy, "critic": write_critic}


def zeros(size: int) -> dict[str, Callable[[Path], None]]:
    def write(dir: Path) -> None:
        (dir / "weights.bin").touch()
        os.truncate(dir / "weights.bin", size)

    return {"policy": write}


def noise(size: int) -> Callable[[Path], None]:
    def write(dir: Path) -> None:
        (dir / "weights").write_bytes(b"x" * size)

    return write


def manager(
    dir: Path, keep: int | None = 2, warnings: list[str] | None = None, **fingerprint: Any
) -> CheckpointManager:
    heard = [] if warnings is None else warnings
    return CheckpointManager(dir, keep=keep, fingerprint=fingerprint, warn=heard.append)


def names(dir: Path) -> list[str]:
    return sorted(path.name for path in dir.iterdir())


def test_state_and_files_come_back(tmp_path: Path) -> None:
    saved = manager(tmp_path).save(12, filled("a"), {"step": 12, "loader": {"epoch": 1, "order": [3, 1, 2]}})
    again = manager(tmp_path)
    assert saved == tmp_path / "step_000012" == again.latest()
    assert again.load(saved) == {"step": 12, "loader": {"epoch": 1, "order": [3, 1, 2]}}
    assert (saved / "policy" / "weights.bin").read_text() == "a" * 1000
    assert (saved / "critic" / "deep" / "weights.bin").read_text() == "a"


class Slow:
    """A writer whose files are written when a test says so, or `broken` instead."""

    def __init__(self, text: str, broken: Exception | None = None) -> None:
        self.text, self.broken, self.ready = text, broken, False

    def __call__(self, dir: Path) -> Callable[[bool], bool]:
        self.dir = dir
        return self.finish

    def finish(self, wait: bool) -> bool:
        if self.broken is not None and (wait or self.ready):
            raise self.broken
        if not (wait or self.ready):
            return False
        (self.dir / "weights.bin").write_text(self.text)
        return True


def test_in_the_background_it_is_published_when_every_writer_has_finished(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2, background=True)
    policy, critic = Slow("a"), Slow("a")
    checkpoints.save(1, {"policy": policy, "critic": critic}, {"step": 1})
    policy.ready = True
    checkpoints.settle(wait=False)
    assert checkpoints.latest() is None, "the critic is not written"
    critic.ready = True
    while checkpoints.latest() is None:
        checkpoints.settle(wait=False)
    checkpoints.save(2, {"policy": Slow("b")}, {"step": 2})
    checkpoints.save(3, {"policy": Slow("c")}, {"step": 3})  # waits for the one before
    assert checkpoints.latest() == tmp_path / "step_000002"
    checkpoints.settle()
    assert checkpoints.load(tmp_path / "step_000003") == {"step": 3}
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_what_goes_wrong_in_the_background_is_told_and_earlier_ones_stay(tmp_path: Path) -> None:
    checkpoints = CheckpointManager(tmp_path, keep=2, background=True)
    checkpoints.save(1, {"policy": Slow("a")}, {"step": 1})
    checkpoints.save(2, {"policy": Slow("a", broken=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))}, {"step": 2})
    with naming(CheckpointError, "step_000002", "begin"):
        checkpoints.settle()
    assert names(tmp_path) == ["step_000001"]
    broken = Slow("a", broken=ValueError("rank 3 says no"))
    checkpoints.save(2, {"policy": broken}, {"step": 2})
    broken.ready = True
    with pytest.raises(ValueError, match="rank 3 says no"):
        checkpoints.settle(wait=False)
    checkpoints.save(2, {"policy": Slow("a")}, {"step": 2})
    checkpoints.give_up()  # the writers are gone
    assert names(tmp_path) == ["step_000001"]
    checkpoints.settle()


def test_interrupted_while_it_is_published_it_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the wait for the thread that publishes, and not the thread: its files are not to go from under it."""
    checkpoints, gone_on = manager(tmp_path, keep=1), threading.Event()
    checkpoints.save(1, filled("a"), {"step": 1})

    def interrupted(*arguments: Any) -> None:
        sealed.seal(*arguments)
        os.kill(os.getpid(), signal.SIGINT)
        gone_on.wait(10.0)

    monkeypatch.setattr("agentrl.checkpoint.manager.seal", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            checkpoints.save(2, filled("b"), {"step": 2})
    finally:
        signal.signal(signal.SIGINT, before)
    gone_on.set()
    checkpoints._thread.shutdown()  # as when the process ends
    assert names(tmp_path) == ["step_000002"]
    assert manager(tmp_path).load(tmp_path / "step_000002") == {"step": 2}


def test_the_newest_are_kept_by_number(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=2)
    for step in (8, 9, 10, 1_000_000):
        checkpoints.save(step, filled("a"), {})
    assert names(tmp_path) == ["step_000010", "step_1000000"]
    assert checkpoints.latest() == tmp_path / "step_1000000"


def test_all_are_kept_without_a_limit(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path, keep=None)
    for step in range(5):
        checkpoints.save(step, filled("a"), {})
    assert len(names(tmp_path)) == 5


def test_a_run_that_went_back_leaves_its_later_steps_behind(tmp_path: Path) -> None:
    warnings: list[str] = []
    checkpoints = manager(tmp_path, keep=3, warnings=warnings)
    for step in (10, 20, 30):
        checkpoints.save(step, filled("old"), {"line": "old"})
    checkpoints.save(20, filled("new"), {"line": "new"})
    assert names(tmp_path) == ["step_000010", "step_000020"]
    assert checkpoints.load(tmp_path / "step_000020") == {"line": "new"}
    assert "[30]" in warnings[0]


def test_none_yet(tmp_path: Path) -> None:
    assert manager(tmp_path / "absent").latest() is None


def test_a_failed_save_leaves_no_trace(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    checkpoints.save(1, filled("a"), {})

    def fails(dir: Path) -> None:
        (dir / "half").write_text("x")
        raise ValueError("cannot write this tensor")

    with pytest.raises(ValueError, match="cannot write this tensor"):
        checkpoints.save(2, {"policy": fails}, {})
    with pytest.raises(TypeError):
        checkpoints.save(2, filled("b"), {"not JSON": object()})  # type: ignore[dict-item]
    assert names(tmp_path) == ["step_000001"]


def test_a_disk_that_takes_no_byte_of_a_save(tmp_path: Path) -> None:
    def full(dir: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(CheckpointError, match=r"full: .*step_000001 could not begin its first file, and [\d,]+ bytes"):
        manager(tmp_path).save(1, {"policy": full}, {})


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / WEIGHTS).read_bytes())
    content[500] ^= 1
    (path / WEIGHTS).write_bytes(content)


def swap_for_another(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name("step_000001"), path)


def move_and_link(path: Path) -> None:
    (path / "critic" / "deep").rename(path.parent.parent / "elsewhere")
    (path / "critic" / "deep").symlink_to(path.parent.parent / "elsewhere")


def state_is(change: Callable[[str], str]) -> Callable[[Path], object]:
    return lambda path: (path / "state.json").write_text(change((path / "state.json").read_text()))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            lambda path: os.truncate(path / WEIGHTS, 999),
            ("policy/weights.bin", "999 bytes", "1,000"),
        ),
        (flip_a_bit, ("damaged", "policy/weights.bin")),
        (
            lambda path: (path / "critic/deep/weights.bin").unlink(),
            ("critic/deep/weights.bin", "missing"),
        ),
        (lambda path: (path / "state.json").unlink(), ("step_000002", "state.json", "has no")),
        (state_is(lambda text: text[:-20]), ("state.json", "damaged")),
        (
            state_is(lambda text: '{"format": 3}'),
            ("key 'fingerprint'", "key 'versions'", "key 'files'", "missing"),
        ),
        (
            state_is(lambda text: '["format", 3]'),
            ("state.json", "found ['format', 3]", "damaged"),
        ),
        (
            state_is(lambda text: text.replace('"step": 2\n', '"step": 7\n')),
            ("state.json", "damaged"),
        ),
        (swap_for_another, ("step_000002", "step 1", "state.json")),
        (
            lambda path: (path / "policy/shard-2.safetensors").touch(),
            "policy/shard-2.safetensors",
        ),
        (move_and_link, ("critic/deep/weights.bin", "missing")),
    ],
)
def test_a_damaged_one_is_named_and_passed_over(tmp_path: Path, damage: Callable[[Path], object], said: Names) -> None:
    warnings: list[str] = []
    dir = tmp_path / "checkpoints"
    checkpoints = manager(dir, warnings=warnings)
    checkpoints.save(1, filled("a"), {"step": 1})
    damage(checkpoints.save(2, filled("b"), {"step": 2}))
    with naming(CheckpointError, said):
        checkpoints.load(dir / "step_000002")
    assert checkpoints.latest() == dir / "step_000001"
    assert len(warnings) == 1
    assert_names(warnings[0], "older one", "looking")


def test_a_run_does_not_start_over_when_every_checkpoint_is_damaged(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    flip_a_bit(checkpoints.save(1, filled("a"), {}))
    with naming(CheckpointError, "resume_mode=disable", "damaged"):
        checkpoints.latest()


LARGE = 105 << 20


def test_large_files_are_checked_whole(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    path = checkpoints.save(1, zeros(LARGE), {"step": 1})
    assert checkpoints.load(path) == {"step": 1}
    with (path / WEIGHTS).open("r+b", buffering=0) as file:
        for position in (0, 3_000_000, LARGE // 2, LARGE - 1):
            os.pwrite(file.fileno(), b"x", position)
            with naming(CheckpointError, "was written", "hold"):
                checkpoints.load(path)
            os.pwrite(file.fileno(), b"\0", position)


def test_a_file_is_read_once_a_start_and_again_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = manager(tmp_path).save(1, filled("a"), {"step": 1})
    read: list[str] = []
    checksum = sealed._checksum

    def counted(file: Path) -> str:
        read.append(file.name)
        return checksum(file)

    monkeypatch.setattr(sealed, "_checksum", counted)
    checkpoints = manager(tmp_path)
    assert checkpoints.latest() == path
    checkpoints.load(path)
    checkpoints.load(path)
    assert len(read) == 2
    flip_a_bit(path)
    with naming(CheckpointError, "was written", "hold"):
        checkpoints.load(path)


def test_what_cannot_be_read_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be whole: going on from an older one would remove it."""
    checkpoints = manager(tmp_path)
    checkpoints.save(1, filled("a"), {"step": 1})
    checkpoints.save(2, filled("b"), {"step": 2})

    def broken(path: Path) -> str:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(sealed, "_checksum", broken)
    with naming(CheckpointError, "step_000002", "Input/output"):
        manager(tmp_path).latest()


def test_a_checkpoint_that_a_link_leads_to_is_used_and_only_the_link_removed(tmp_path: Path) -> None:
    manager(tmp_path / "here").save(1, filled("a"), {"step": 1})
    (tmp_path / "here" / "step_000001").rename(tmp_path / "large_disk")
    (tmp_path / "here" / "step_000001").symlink_to(tmp_path / "large_disk")
    checkpoints = manager(tmp_path / "here", keep=1)
    assert checkpoints.load(tmp_path / "here" / "step_000001") == {"step": 1}
    checkpoints.save(2, filled("b"), {"step": 2})
    assert names(tmp_path / "here") == ["step_000002"]
    assert (tmp_path / "large_disk" / "state.json").exists()


def test_a_missing_one_says_what_there_is(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    checkpoints.save(4, filled("a"), {})
    with naming(CheckpointError, "step_000005:", "step_000004"):
        checkpoints.load(tmp_path / "step_000005")


def test_one_of_another_model_says_what_differs(tmp_path: Path) -> None:
    path = manager(tmp_path, hidden_size=128, vocab=("a", 409), critic=True).save(1, filled("a"), {})
    with pytest.raises(CheckpointError) as error:
        manager(tmp_path, hidden_size=256, vocab=["a", 409], lora=8).load(path)
    text = str(error.value)
    assert_names(text, "hidden_size:", "128", "256")
    assert_names(text, "critic: true", "not set")
    assert_names(text, "lora: not set", "8")
    assert "vocab" not in text
    assert manager(tmp_path, hidden_size=256).latest() == path  # found, so that `load` can say what is wrong


def test_another_format_is_refused_not_passed_over(tmp_path: Path) -> None:
    checkpoints = manager(tmp_path)
    checkpoints.save(1, filled("a"), {})
    path = checkpoints.save(2, filled("a"), {})
    record = json.loads((path / "state.json").read_text())
    del record["checksum"]
    sealed.write_record(path, record | {"format": 4, "versions": {"agentrl": "9.1"}})
    for use in (checkpoints.latest, lambda: checkpoints.load(path)):
        with pytest.raises(CheckpointError, match=r"format 4, by agentrl 9\.1; .* reads 3\. Use agentrl 9\.1, or"):
            use()


def test_other_package_versions_are_told(tmp_path: Path) -> None:
    warnings: list[str] = []
    checkpoints = manager(tmp_path, warnings=warnings)
    path = checkpoints.save(1, filled("a"), {})
    record = json.loads((path / "state.json").read_text())
    record["versions"]["torch"] = "1.0"
    del record["checksum"]
    sealed.write_record(path, record)
    checkpoints.load(path)
    assert len(warnings) == 1
    assert_names(warnings[0], "1.0")


def test_what_a_kill_left_is_cleaned_up(tmp_path: Path) -> None:
    manager(tmp_path).save(1, filled("a"), {"step": 1})
    shutil.copytree(tmp_path / "step_000001", tmp_path / ".step_000002.partial")
    shutil.copytree(tmp_path / "step_000001", tmp_path / ".step_000000.removed")
    shutil.copytree(tmp_path / "step_000001", tmp_path / ".step_000001.replaced")
    (tmp_path / "mine").mkdir()
    left, found = names(tmp_path), manager(tmp_path)
    assert found.latest() == tmp_path / "step_000001"
    assert names(tmp_path) == left, "a command that is refused now changes nothing"
    found.clean_up()
    assert names(tmp_path) == ["mine", "step_000001"]


def test_a_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    manager(tmp_path).save(1, filled("a"), {"step": 1})
    (tmp_path / "step_000001").rename(tmp_path / ".step_000001.replaced")
    checkpoints = manager(tmp_path)
    assert checkpoints.load(tmp_path / "step_000001") == {"step": 1}


KILL_BEFORE_EACH_OPERATION = """
import json, os, shutil, signal, sys
from pathlib import Path
from agentrl.checkpoint.manager import CheckpointManager, step_in

EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir"}


def write(text):
    def fill(dir):
        (dir / "weights").write_text(text)

    return {"policy": fill}


def save_and_die(dir, operation):
    \"\"\"In a child: save step 2 once more, and die just before its n-th operation on a file.\"\"\"
    checkpoints = CheckpointManager(dir, keep=1)
    seen = 0

    def hook(event, arguments):
        nonlocal seen
        if event in EVENTS:
            seen += 1
            if seen == operation:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    checkpoints.save(2, write("new"), {"text": "new"})


root = Path(sys.argv[1])
start = CheckpointManager(root / "start", keep=None)
for step in (1, 2, 3):
    start.save(step, write("old"), {"text": "old"})

found = []
for operation in range(1, 1000):
    dir = root / str(operation)
    shutil.copytree(root / "start", dir)
    child = os.fork()
    if not child:
        save_and_die(dir, operation)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    warnings = []
    checkpoints = CheckpointManager(dir, keep=1, warn=warnings.append)
    path = checkpoints.latest()
    assert checkpoints.load(path)["text"] == (path / "policy" / "weights").read_text()
    text = checkpoints.load(path)["text"]
    checkpoints.clean_up()
    found.append([path.name, text, len(warnings), sorted(p.name for p in dir.iterdir())])
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL
print(json.dumps(found))
"""


def test_killed_before_each_operation_on_a_file(tmp_path: Path) -> None:
    """The new step 2 takes the place of the old one, and steps 1 and 3 go: every state in between is sound."""
    ran = subprocess.run(
        [sys.executable, "-c", KILL_BEFORE_EACH_OPERATION, str(tmp_path)], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert len(found) > 20
    assert all(warnings == 0 for _, _, warnings, _ in found)
    assert all(not name.startswith(".") for *_, left in found for name in left)
    # Step 3 was given up when the run went back: it is gone before the new step 2 can be found, the old one until then.
    texts = [(name, text) for name, text, _, _ in found]
    order = [("step_000003", "old"), ("step_000002", "old"), ("step_000002", "new")]
    assert list(dict.fromkeys(texts)) == order
    assert texts == sorted(texts, key=order.index)
    assert found[-1][3] == ["step_000002"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB."""
    with small_disk_in(tmp_path, "4m") as mount:
        yield mount


@pytest.mark.parametrize(
    "write",
    [
        noise(6_000_000),
        lambda dir: torch.save({"weight": torch.zeros(1_500_000)}, dir / "weights.pt"),
        lambda dir: save_file({"weight": torch.zeros(1_500_000)}, dir / "weights.safetensors"),
    ],
    ids=["plain", "torch", "safetensors"],
)
def test_a_disk_that_fills_up_during_a_save(small_disk: Path, write: Callable[[Path], None]) -> None:
    checkpoints = manager(small_disk / "checkpoints")
    first = checkpoints.save(1, filled("a"), {"step": 1})
    with naming(CheckpointError, "step_000002", "bytes"):
        checkpoints.save(2, {"policy": write}, {"step": 2})
    assert names(small_disk / "checkpoints") == ["step_000001"]
    assert checkpoints.latest() == first
    assert checkpoints.load(first) == {"step": 1}


def test_a_disk_without_room_is_seen_before_anything_is_written(small_disk: Path) -> None:
    checkpoints = manager(small_disk / "checkpoints")
    first = checkpoints.save(1, {"policy": noise(2_500_000)}, {"step": 1})
    wrote: list[Path] = []
    with pytest.raises(CheckpointError, match=r"needs about 2,50\d,\d{3} bytes and 1,6\d\d,\d{3} were free"):
        checkpoints.save(2, {"policy": wrote.append}, {"step": 2})
    assert wrote == []
    assert checkpoints.latest() == first


def test_a_disk_that_fills_up_with_the_state(small_disk: Path) -> None:
    checkpoints = manager(small_disk / "checkpoints")
    with pytest.raises(CheckpointError, match="the disk is full"):
        checkpoints.save(1, {}, {"rng": [100_000_000] * 500_000})
    assert names(small_disk / "checkpoints") == []
