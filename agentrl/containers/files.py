"""Archives of files for containers, and of the files that a program leaves in one.

What comes out of a container is never unpacked on this machine: its names and links are copied from one archive to
another, for the container of the check.
"""

from __future__ import annotations

import errno
import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path, PurePosixPath

from agentrl.containers.contract import Unfit

MOST_FILES = 100_000
"""Files and folders that may be taken out of a container."""
HEADS_OF_A_FILE = 3
"""Heads that a file has where its name and its link's target are long."""
LONGEST_NAME = 4096
"""Characters of a name: the kernel opens no longer path."""


class Heads:
    """Counter of the members of an archive that comes in pieces: a program may leave more than can be read in time."""

    def __init__(self) -> None:
        self._seen, self._next, self._rest = 0, 0, b""

    def read(self, piece: bytes) -> None:
        """Take the archive's next bytes. Raises Unfit for more members than MOST_FILES can have."""
        piece, place = self._rest + piece, self._next
        while place + tarfile.BLOCKSIZE <= len(piece):
            place += tarfile.BLOCKSIZE * (1 + -(-_size(piece[place + 124 : place + 136]) // tarfile.BLOCKSIZE))
            self._seen += 1
        if self._seen > HEADS_OF_A_FILE * MOST_FILES:
            raise Unfit(f"more than {MOST_FILES:,} files")
        self._next = max(place - len(piece), 0)
        self._rest = piece[place:]


def pack(archive: Path, folders: Mapping[str, Path], ids: tuple[int, int]) -> None:
    """Write an archive of folders of this machine, by the absolute path that each has in the container."""

    def owned(member: tarfile.TarInfo) -> tarfile.TarInfo:
        return _owned(member, ids)

    with tarfile.open(archive, "w") as out:
        for place, folder in folders.items():
            out.add(folder, place.lstrip("/"), filter=owned)


def merge(
    archive: Path,
    taken: Path,
    place: str,
    files: Mapping[str, str],
    ids: tuple[int, int],
    *,
    most: int,
    without: frozenset[str] = frozenset(),
) -> None:
    """Write an archive of the files in `taken`, below `place`, with `files` in place of anything at their paths.

    `files`, and the folders on the way to them, are root's: nobody else can change, move or remove them, and anybody
    can make further files in these folders. `most`: bytes of all files. `without`: names at the top that are left out.
    Raises Unfit.
    """
    laid = {PurePosixPath(path): text for path, text in files.items()}
    folders = {parent for path in laid for parent in path.parents}
    # What is there already: True for a folder.
    there = {"/".join(path.parts): path in folders for path in (*folders, *laid)}
    top = PurePosixPath(place.lstrip("/"))
    with tarfile.open(archive, "w") as out, _opened(taken) as source:
        for folder in sorted(folders):
            member = tarfile.TarInfo(str(top / folder))
            member.type, member.mode = tarfile.DIRTYPE, 0o1777
            out.addfile(member)
        for path, text in laid.items():
            encoded = text.encode()
            member = tarfile.TarInfo(str(top / path))
            member.size, member.mode = len(encoded), 0o555 if encoded.startswith(b"#!") else 0o444
            out.addfile(member, io.BytesIO(encoded))
        for name, member, content in _members(source, most, there):
            if name.partition("/")[0] in without:
                continue
            copied = _owned(tarfile.TarInfo(f"{top}/{name}".rstrip("/")), ids)
            copied.mode, copied.mtime = member.mode & 0o777, member.mtime
            if member.isdir():
                copied.type = tarfile.DIRTYPE
                out.addfile(copied)
            elif member.issym():
                copied.type, copied.linkname = tarfile.SYMTYPE, member.linkname
                out.addfile(copied)
            else:
                copied.size = content.size
                out.addfile(copied, source.extractfile(content))


@contextmanager
def _opened(taken: Path) -> Iterator[tarfile.TarFile]:
    """Open an archive that a hostile program may have made. Raises Unfit.

    It is not decompressed: a short one could hold an enormous header. Python's own errors at numbers of a header are
    the archive's, too: times that are no time, sizes beyond memory or beyond a file.
    """
    try:
        with closing(tarfile.open(taken, "r:")) as source:
            yield source
    except OSError as error:
        if error.errno != errno.EINVAL:  # of a seek to where no file has a byte
            raise
        raise Unfit(f"no tar archive: {error}") from error
    except (tarfile.TarError, RecursionError, ValueError, ArithmeticError, MemoryError) as error:
        raise Unfit(f"no tar archive: {error!r:.200}") from error


def _members(
    source: tarfile.TarFile, most: int, there: dict[str, bool]
) -> Iterator[tuple[str, tarfile.TarInfo, tarfile.TarInfo]]:
    """Give the files, folders and links of an archive: (path below its folder, member, member with its content).

    A second name of a file becomes a file of its own. Pipes, sockets and devices are left out, and so is what lies
    below a link or a file: a program that made the archive may lead elsewhere. `there`: paths that are taken, True for
    a folder; those of the archive are added. The time is linear in the names' characters, however deep they are.
    """
    size, implied, files = 0, 0, dict[str, tarfile.TarInfo]()
    for number, member in enumerate(source):
        content: tarfile.TarInfo | None = member
        if member.isreg():
            files[member.name] = member
        elif member.islnk():
            content = files.get(member.linkname)
        elif not member.isdir() and not member.issym():
            content = None
        size += 0 if content is None else content.size
        if number + implied >= MOST_FILES or size > most:
            raise Unfit(f"more than {MOST_FILES:,} files, or {most:,} bytes in them")
        if member.size < 0:
            raise Unfit(f"no tar archive: a file of {member.size} bytes")
        if len(member.name) > LONGEST_NAME:
            raise Unfit(f"a name of more than {LONGEST_NAME:,} characters: {member.name[:80]}...")
        parts = member.name.split("/")
        name = "/".join(part for part in parts if part not in ("", "."))
        if content is None or member.name.startswith("/") or ".." in parts or name in there:
            continue
        unknown, parent = list[str](), name.rpartition("/")[0]
        while parent and parent not in there:
            unknown.append(parent)
            parent = parent.rpartition("/")[0]
        is_in_folder = there.get(parent, True)
        implied += len(unknown)
        there.update(dict.fromkeys(unknown, is_in_folder))
        if is_in_folder:
            there[name] = member.isdir()
            yield name, member, content


def _size(field: bytes) -> int:
    """Read the size in a member's head: digits, or a number of bytes; 0 for what is no size."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.strip(b" \0")
    return int(digits, 8) if digits.isdigit() and b"8" not in digits and b"9" not in digits else 0


def _owned(member: tarfile.TarInfo, ids: tuple[int, int]) -> tarfile.TarInfo:
    member.uid, member.gid = ids
    member.uname = member.gname = ""
    return member
