"""Archives of files for containers, and of the files that a program leaves in one.

What comes out of a container is never unpacked on this machine: its names and links are copied from one archive to
another, for the container of the check.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path, PurePosixPath

MOST_FILES = 100_000
"""Files that may be taken out of a container."""


class TooManyFiles(ValueError):
    """A program left more than is judged."""


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
    Raises TooManyFiles.
    """
    laid = {PurePosixPath(path): text for path, text in files.items()}
    folders = {parent for path in laid for parent in path.parents}
    top = PurePosixPath(place.lstrip("/"))
    with tarfile.open(archive, "w") as out, closing(tarfile.open(taken)) as source:
        for folder in sorted(folders):
            member = tarfile.TarInfo(str(top / folder))
            member.type, member.mode = tarfile.DIRTYPE, 0o1777
            out.addfile(member)
        for path, text in laid.items():
            encoded = text.encode()
            member = tarfile.TarInfo(str(top / path))
            member.size, member.mode = len(encoded), 0o555 if encoded.startswith(b"#!") else 0o444
            out.addfile(member, io.BytesIO(encoded))
        for path, member, content in _members(source, most):
            is_laid = path in laid or any(parent in laid for parent in path.parents)
            if is_laid or path in folders or path.parts[:1] in [(name,) for name in without]:
                continue
            copied = _owned(tarfile.TarInfo(str(top / path)), ids)
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


def _members(source: tarfile.TarFile, most: int) -> Iterator[tuple[PurePosixPath, tarfile.TarInfo, tarfile.TarInfo]]:
    """Give the files, folders and links of an archive: (path below its folder, member, member with its content).

    A second name of a file becomes a file of its own. Pipes, sockets and devices are left out.
    """
    size, files, seen = 0, dict[str, tarfile.TarInfo](), dict[PurePosixPath, bool]()
    for number, member in enumerate(source):
        content: tarfile.TarInfo | None = member
        if member.isreg():
            files[member.name] = member
        elif member.islnk():
            content = files.get(member.linkname)
        elif not member.isdir() and not member.issym():
            content = None
        size += 0 if content is None else content.size
        if number >= MOST_FILES or size > most:
            raise TooManyFiles(f"more than {MOST_FILES:,} files, or {most:,} bytes in them")
        path = PurePosixPath(member.name)
        if content is None or path.is_absolute() or ".." in path.parts or path in seen:
            continue
        if all(
            seen.get(parent, True) for parent in path.parents
        ):  # A program that made the archive may lead elsewhere.
            seen[path] = member.isdir()
            yield path, member, content


def _owned(member: tarfile.TarInfo, ids: tuple[int, int]) -> tarfile.TarInfo:
    member.uid, member.gid = ids
    member.uname = member.gname = ""
    return member
