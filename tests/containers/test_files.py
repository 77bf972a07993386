"""What comes out of a container is copied for the check, also from an archive that a hostile program made."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path

import pytest

from agentrl.containers import files
from agentrl.containers.contract import Unfit
from agentrl.containers.files import Heads, merge

Given = list[tuple[str, bytes, str]]
"""(name, type, content or target) of each member."""
FILE, FOLDER, LINK, SECOND, PIPE = tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE


def merged(folder: Path, given: Given, laid: dict[str, str], most: int = 1 << 20) -> dict[str, tarfile.TarInfo]:
    """Merge members with the files of a check; return what the archive for the check has, by name."""
    with tarfile.open(folder / "taken.tar", "w") as out:
        for name, kind, text in given:
            member = tarfile.TarInfo(name)
            member.type, member.mode, member.uid = kind, 0o6777, 0
            member.linkname = text if kind in (LINK, SECOND) else ""
            member.size = len(text) if kind == FILE else 0
            out.addfile(member, io.BytesIO(text.encode()))
    merge(folder / "out.tar", folder / "taken.tar", "/tmp/work", laid, (7, 8), most=most, without=frozenset((".git",)))
    with tarfile.open(folder / "out.tar") as made:
        members = made.getmembers()
        assert len({one.name for one in members}) == len(members), "no name stands twice"
        for one in members:
            stream = made.extractfile(one) if one.isreg() else None
            one.pax_headers = {"text": stream.read().decode() if stream is not None else one.linkname}
    return {one.name.removeprefix("tmp/work").strip("/"): one for one in members}


def test_files_of_the_check_are_roots_and_all_others_the_users(tmp_path: Path) -> None:
    given: Given = [(".", FOLDER, ""), ("./a", FOLDER, ""), ("./a/b", FILE, "mine"), ("./other", FILE, "x")]
    found = merged(tmp_path, given, {"a/b": "laid", "new/run.sh": "#!/bin/sh"})
    assert {name: (one.uid, oct(one.mode)) for name, one in found.items()} == {
        "": (0, "0o1777"),
        "a": (0, "0o1777"),
        "new": (0, "0o1777"),
        "a/b": (0, "0o444"),
        "new/run.sh": (0, "0o555"),
        "other": (7, "0o777"),
    }
    assert found["a/b"].pax_headers["text"] == "laid"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([("tests", LINK, "/etc"), ("tests/hidden.py", FILE, "x")], set()),
        ([("tests", FILE, "x")], set()),
        ([("tests/hidden.py", FOLDER, ""), ("tests/hidden.py/deep", FILE, "x")], set()),
        ([("way", LINK, "tests"), ("way/hidden.py", FILE, "x")], {"way"}),
        ([("way", LINK, "."), ("./way/tests/hidden.py", FILE, "x")], {"way"}),
        ([("way", FILE, "x"), ("./way", LINK, "tests"), ("way/", FOLDER, "")], {"way"}),
        ([("../up", FILE, "x"), ("/etc/passwd", FILE, "x"), ("a/../../up", FILE, "x")], set()),
        (
            [("pipe", PIPE, ""), ("second", SECOND, "missing"), ("one", FILE, "x"), ("two", SECOND, "one")],
            {"one", "two"},
        ),
        ([(".git/config", FILE, "x"), (".git", FILE, "x"), ("a.git", FILE, "x")], {"a.git"}),
    ],
)
def test_no_name_leads_to_a_file_of_the_check_or_out(tmp_path: Path, given: Given, names: set[str]) -> None:
    found = merged(tmp_path, given, {"tests/hidden.py": "laid"})
    assert found.keys() - {"", "tests", "tests/hidden.py"} == names
    assert found["tests/hidden.py"].pax_headers["text"] == "laid" and found["tests"].isdir()
    assert all(found[name].uid == 7 and not found[name].mode & 0o7000 for name in names)
    assert all(found[name].isreg() and found[name].size == 1 for name in names & {"one", "two"})


def test_bounds_hold_for_second_names_of_a_large_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: Given = [("large", FILE, "x" * 1000), *((f"n{number}", SECOND, "large") for number in range(9))]
    assert len(merged(tmp_path, given, {}, most=10_000)) == 10
    with pytest.raises(Unfit):
        merged(tmp_path, given, {}, most=9_999)
    monkeypatch.setattr(files, "MOST_FILES", 9)
    with pytest.raises(Unfit):
        merged(tmp_path, given, {})


def test_folders_that_names_imply_count_and_deep_names_take_no_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each name has 2,000 levels: a step for each pair of levels would take minutes."""
    deep = "a/" * 2000
    given: Given = [("way", LINK, "/"), *((f"{top}/{deep}{number}", FILE, "x") for top in "aw" for number in range(50))]
    found = merged(tmp_path, [*given, (f"way/{deep}x", FILE, "x"), ("a/" * 9, FOLDER, "")], {})
    assert len(found) == 101 and "way" in found
    monkeypatch.setattr(files, "MOST_FILES", 4000)
    with pytest.raises(Unfit):
        merged(tmp_path, given, {})
    with pytest.raises(Unfit, match="name of more than"):
        merged(tmp_path, [("a" * 4097, FILE, "x")], {})


def chained() -> bytes:
    member = tarfile.TarInfo("a")
    member.type, member.size = tarfile.GNUTYPE_LONGNAME, 2
    return (member.tobuf(tarfile.GNU_FORMAT) + b"a".ljust(512, b"\0")) * 2000


def below_zero() -> bytes:
    member = tarfile.TarInfo("a")
    member.size = -1024
    return member.tobuf(tarfile.GNU_FORMAT)


def beyond(kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("a")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT) + bytes(512)


def told(**headers: str) -> bytes:
    member = tarfile.TarInfo("a")
    member.pax_headers = {name.replace("_", "."): value for name, value in headers.items()}
    return member.tobuf(tarfile.PAX_FORMAT)


HOSTILE = {
    "empty": b"",
    "text": b"x" * 5000,
    "compressed": gzip.compress(bytes(10240)),
    "chained": chained(),
    "below zero": below_zero(),
    "cut": tarfile.TarInfo("a").tobuf()[:300],
    "endless time": told(mtime="inf"),
    "no time": told(mtime="nan"),
    "map of no numbers": told(GNU_sparse_map="x,1", GNU_sparse_size="3"),
    "name beyond memory": beyond(tarfile.GNUTYPE_LONGNAME, 1 << 62),
    "headers beyond numbers": beyond(tarfile.XHDTYPE, 1 << 70),
    "holes beyond files": beyond(tarfile.GNUTYPE_SPARSE, 1 << 62),
}


@pytest.mark.parametrize("made", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_archive_is_unfit(tmp_path: Path, made: bytes) -> None:
    (tmp_path / "taken.tar").write_bytes(made)
    with pytest.raises(Unfit, match="no tar archive"):
        merge(tmp_path / "out.tar", tmp_path / "taken.tar", "/tmp/work", {}, (7, 8), most=1 << 20)


def test_members_are_counted_as_they_come_and_too_many_are_unfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes in digits and in bytes are skipped, however the pieces lie; what is no archive ends, too."""
    large, long, link = tarfile.TarInfo("large"), tarfile.TarInfo("n" * 300), tarfile.TarInfo("l" * 300)
    large.size, long.size, link.type, link.linkname = 1300, 1, LINK, "t" * 300
    made = large.tobuf() + b"\0" * 1536 + long.tobuf(tarfile.GNU_FORMAT) + b"\0" * 512 + link.tobuf(tarfile.GNU_FORMAT)
    monkeypatch.setattr(files, "MOST_FILES", 2)
    for size in (1, 511, 512, 513, 4000):
        heads = Heads()
        for at in range(0, len(made), size):
            heads.read(made[at : at + size])  # six heads
        with pytest.raises(Unfit):
            heads.read(bytes(512))
    beyond_digits = Heads()
    huge = tarfile.TarInfo("huge")
    huge.size = 9 << 30
    beyond_digits.read(huge.tobuf(tarfile.GNU_FORMAT) + bytes(512 * 100))
    with pytest.raises(Unfit):
        Heads().read(b"no archive" * 1000)
