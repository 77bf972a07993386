"""Which tests `make test` leaves to `make test-all`, and how that goes on after an interruption."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import whole
from tests.conftest import PROJECT
from tests.tiers import FAST, KINDS, draw

FAMILY = """
import pytest

@pytest.mark.slice(2, "matrix")
@pytest.mark.parametrize("case", range(9))
def test_family(case):
    assert case < 9

@pytest.mark.parametrize("case", range(3))
def test_others(case):
    assert case < 3
"""
FILE = """
import pytest

pytestmark = pytest.mark.slice(1, "kill")

def test_one(): pass
def test_two(): pass

@pytest.mark.slice(0, "soak")
def test_three(): pass
"""


BARE = {"PYTHONPATH": str(PROJECT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def collected(folder: Path, *options: str) -> list[str]:
    """Ids of the tests that a pytest of its own would run."""
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.tiers", "-p", "no:cacheprovider"]
    done = subprocess.run([*words, *options], cwd=folder, capture_output=True, text=True, env=BARE)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


@pytest.fixture
def families(tmp_path: Path) -> Path:
    (tmp_path / "test_family.py").write_text(FAMILY)
    (tmp_path / "test_file.py").write_text(FILE)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slice(keep, kind): a family\n")
    return tmp_path


def test_a_slice_is_drawn_by_its_seed_and_the_whole_has_every_test(families: Path) -> None:
    slice_of = collected(families)
    kept = [name for name in slice_of if "test_family[" in name]
    assert len(kept) == 2 and sum("test_others" in name for name in slice_of) == 3
    assert sum("test_file" in name for name in slice_of) == 1 and not any("test_three" in name for name in slice_of)
    assert collected(families, "--slice-seed=other", "test_file.py") != []
    assert len(collected(families, "--whole")) == 15
    assert len(collected(families, "test_file.py::test_three", "test_family.py::test_family[3]")) == 2


def test_seeds_draw_every_member_sooner_or_later() -> None:
    members = [f"test[{case}]" for case in range(9)]
    assert set().union(*(draw(members, 2, str(seed)) for seed in range(60))) == set(members)
    assert draw(members, 2, "0") == draw(members[::-1], 2, "0")
    assert draw(members, 20, "0") == set(members)


def test_a_mark_without_a_known_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test_wrong.py").write_text('import pytest\n\n@pytest.mark.slice(1, "slow")\ndef test_x(): pass\n')
    words = [sys.executable, "-m", "pytest", "-q", "-p", "tests.tiers", "-W", "ignore"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=BARE)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_wrong.py::test_x: want slice(keep, kind)" in done.stdout + done.stderr and "matrix" in KINDS


def test_files_with_long_tests_come_first(families: Path) -> None:
    long = "import pytest\n\n@pytest.mark.timeout(900)\ndef test_long(): pass\ndef test_short(): pass\n"
    (families / "test_z.py").write_text(long)
    assert [name.partition("::")[0] for name in collected(families)][:3] == ["test_z.py", "test_z.py", "test_family.py"]


@pytest.mark.slice(0, "documents")
def test_the_page_lists_every_family() -> None:
    page = (PROJECT / "docs" / "testing.md").read_text()
    words = [sys.executable, "-m", "pytest", "-o", "norecursedirs=.*", "--collect-only", "-q", "--families", "tests"]
    done = subprocess.run(words, cwd=PROJECT, capture_output=True, text=True)
    rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    assert len(rows) > 10 and rows == [line for line in page.splitlines() if line.startswith("|")]


def test_every_folder_of_tests_is_a_part() -> None:
    known = {part.name for part in whole.parts("python", {"sglang": "python", "vllm": "python"}, 1)}
    folders = {file.relative_to(PROJECT / "tests").parts[0] for file in (PROJECT / "tests").glob("*/**/test_*.py")}
    assert folders <= known and {"loose files", *whole.SOAKS} <= known


def test_what_has_passed_on_the_same_files_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    ran = tmp_path / "ran"
    count = f"open({str(ran)!r}, 'a').write('x')"
    good = whole.Part("good", [sys.executable, "-c", f"{count}; import sys; print(*sys.argv[1:])", whole.OUT], False)
    bad = whole.Part("bad", [sys.executable, "-c", f"{count}; raise SystemExit(3)"], False)
    monkeypatch.setattr(whole, "parts", lambda *_: [good, bad])
    monkeypatch.setattr(whole, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(whole, "state_of_files", lambda: ("tree", "abc"))
    assert whole.main([]) == 1 and ran.read_text() == "xx"
    assert whole.main([]) == 1 and ran.read_text() == "xxx", "only what failed"
    printed = capfd.readouterr().out
    assert "bad (exit status 3)" in printed and str(tmp_path / "results" / "out" / "good" / "tree") in printed
    monkeypatch.setattr(whole, "state_of_files", lambda: ("another tree", "def"))
    assert whole.main(["good"]) == 0 and ran.read_text() == "xxxx"
    assert json.loads((tmp_path / "results" / "good.json").read_text())["commit"] == "def"
    monkeypatch.setattr(whole, "PAGE", page := tmp_path / "page.md")
    begin, end = whole.MARKS
    older = "| bad (exit status 1) | 2 | 1 |  | 0.5 | 0.5 | abc |"
    page.write_text(f"before\n{begin}\n\n{whole.HEAD}\n{older}\n| gone | 9 |  |  | 1.0 | 1.0 | abc |\n\n{end}\nafter\n")
    (tmp_path / "results" / "bad.json").unlink()
    whole.main(["good", "--document"])
    assert older in page.read_text() and "| good |" in page.read_text() and "gone" not in page.read_text()
    assert "| all | 2 | 1 | 0 | 0.5 |" in page.read_text()


def test_the_state_of_files_follows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=t", "-c", "user.email=t@t", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "a").write_text("1")
    git("add", "a")
    git("commit", "-qm", "a")
    monkeypatch.setattr(whole, "PROJECT", tmp_path)
    committed, name = whole.state_of_files()
    assert not name.endswith("+")
    (tmp_path / "b").write_text("not added")
    changed, name = whole.state_of_files()
    assert changed != committed and name.endswith("+")
    assert subprocess.run(["git", "diff", "--cached", "--quiet"], cwd=tmp_path).returncode == 0, (
        "the index is as it was"
    )


def test_fast_collects_its_own_files_alone() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "fast", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    files = {line.partition("::")[0].removeprefix("tests/").partition("/")[0] for line in done.stdout.splitlines()}
    assert done.returncode == 0 and set(FAST) <= files, done.stdout[-2000:]
    assert "deselected" not in done.stdout, "no other test was imported"
