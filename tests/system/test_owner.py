"""What a killed process left is found by its name, and what others use is left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.system import owner

KILLED = """
import os, signal
from agentrl.system.owner import new_folder
print(new_folder(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path


def changed(name: str, **parts: str) -> str:
    """Write a name with other parts."""
    order = ("prefix", "machine", "boot", "process", "started", "random")
    assert len(name.split("-")) == len(order)
    return "-".join(parts.get(part, old) for part, old in zip(order, name.split("-"), strict=True))


def test_an_owner_is_a_process_of_this_machine_and_its_start() -> None:
    ours = owner.new_name()
    assert not owner.is_left(ours)
    for ended in ({"boot": "before00"}, {"process": str(2**22 + 1)}, {"started": "1"}):
        assert owner.is_left(changed(ours, **ended)), ended
    for foreign in (changed(ours, machine="elsewher"), changed(ours, prefix="other"), "agentrl-x", "agentrl", ""):
        assert not owner.is_left(foreign), foreign


def test_without_a_folder_of_processes_the_live_are_told_from_the_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "PROCESSES", tmp_path / "none")
    ours = owner.new_name()
    assert not owner.is_left(ours) and not owner.is_left(changed(ours, process="1"))
    assert owner.is_left(changed(ours, process=str(2**22 + 1)))


def test_only_what_ended_processes_of_this_machine_left_is_removed(temporary: Path) -> None:
    """A number of a process that came again, and another machine's that shares the folder, are told apart."""
    live = owner.new_folder()
    left, again, elsewhere = (
        temporary / changed(live.name, **parts)
        for parts in ({"process": str(2**22 + 1)}, {"started": "1"}, {"machine": "elsewher", "process": "1"})
    )
    for folder in (left, again, elsewhere):
        (folder / "work").mkdir(parents=True)
        (folder / "work" / "file").write_text("text")
    (left / "work").chmod(0)  # as a program can leave it
    archive = temporary / f"{left.name}.tar"
    archive.touch()
    owner.remove_left_folders()
    assert sorted(temporary.iterdir()) == sorted([live, elsewhere])
    assert (elsewhere / "work" / "file").exists()


def test_a_process_that_is_killed_leaves_a_folder_that_the_next_removes(temporary: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, env={**os.environ, "TMPDIR": str(temporary)}
    )
    folder = Path(run.stdout.strip())
    assert run.returncode == -signal.SIGKILL and folder.is_dir() and folder.parent == temporary, run.stderr
    owner.remove_left_folders()
    assert not folder.exists()


def test_a_link_with_the_name_of_what_was_left_leads_nowhere(
    temporary: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The temporary folder is every user's: a name is no proof."""
    (target := tmp_path_factory.mktemp("target") / "folder").mkdir()
    target.chmod(0o711)
    (temporary / changed(owner.new_name(), process=str(2**22 + 1))).symlink_to(target.parent)
    owner.remove_left_folders()
    assert not list(temporary.iterdir()) and target.stat().st_mode & 0o777 == 0o711


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_another_user_stays(temporary: Path) -> None:
    (folder := temporary / changed(owner.new_name(), process=str(2**22 + 1))).mkdir()
    os.chown(folder, 12345, 12345)
    owner.remove_left_folders()
    assert folder.exists()


def test_a_folder_for_a_while_is_gone_with_its_block(temporary: Path) -> None:
    with pytest.raises(ValueError, match="ended"), owner.own_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700 and not owner.is_left(folder.name)
        raise ValueError("ended")
    assert not folder.exists()


def test_folders_deeper_than_a_path_are_removed_and_links_are_not_followed(tmp_path: Path) -> None:
    """A program leaves 3,000 of them, one in the other; a path has 4,096 characters."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    script = (
        "import os\n"
        f"os.makedirs({str(tmp_path / 'left' / 'locked' / 'inner')!r}); os.chdir({str(tmp_path / 'left')!r})\n"
        f"os.symlink({str(outside)!r}, 'locked/inner/link'); os.chmod('locked', 0)\n"
        "for _ in range(3000): os.mkdir('a'); open('file', 'w').close(); os.chdir('a')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    owner.remove(tmp_path / "left")
    assert [one.name for one in tmp_path.iterdir()] == ["outside"] and (outside / "kept").exists()
    owner.remove(tmp_path / "left")
