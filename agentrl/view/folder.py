"""Read access to a folder on a disk or in an object store, which never writes and reads only whole files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import IO, cast

import fsspec
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from agentrl.errors import DataError, first_line, install_extra
from agentrl.system.versions import RECORD, writer_in

MOST_BYTES = 1 << 28
"""Largest file that is read as a whole."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Size and time of a file's last change; they reveal another file at its place."""

    size: int
    changed: str


class Folder:
    """Files below one address, as fsspec names it: a path, s3://bucket/run, ..."""

    def __init__(self, url: str) -> None:
        """Raises DataError when the address cannot be opened."""
        try:
            self._fs, root = fsspec.url_to_fs(url)
        except (ImportError, ValueError, OSError) as error:
            raise DataError(f"{url}: {first_line(error)}. S3 needs: {install_extra('s3')}") from error
        self.url, self._root = url.rstrip("/") or url, root.rstrip("/") or root

    @property
    def is_local(self) -> bool:
        """True for a folder on this machine's disk."""
        return "file" in (self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,))

    @property
    def path(self) -> str:
        """The address without its protocol."""
        return str(self._root)

    def exists(self) -> bool:
        """Check whether anything is at the address. Raises DataError when the store does not answer."""
        try:
            return bool(self._fs.exists(self._root))
        except Exception as error:
            raise DataError(f"{self.url} cannot be read: {type(error).__name__}: {first_line(error)}") from error

    def is_file(self) -> bool:
        """Check whether the address itself is a file."""
        return bool(self._fs.isfile(self._root))

    def files(self, below: str = "") -> dict[str, Stamp]:
        """List the files right below the folder by name; empty where there is no such folder."""
        self._fs.invalidate_cache()
        try:
            entries = self._fs.ls(self.at(below), detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except Exception as error:
            raise DataError(f"{self.url} cannot be read: {type(error).__name__}: {first_line(error)}") from error
        return {
            str(entry["name"]).rstrip("/").rpartition("/")[2]: Stamp(
                int(entry.get("size") or 0), str(entry.get("mtime", entry.get("LastModified", entry.get("ETag", ""))))
            )
            for entry in entries
            if entry["type"] == "file"
        }

    def folders(self) -> set[str]:
        """Names of the folders right below."""
        try:
            entries = self._fs.ls(self._root, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return set()
        return {str(one["name"]).rstrip("/").rpartition("/")[2] for one in entries if one["type"] == "directory"}

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytes | None:
        """Read bytes [start, end) of a file; None where there is no such file. Raises DataError for too many."""
        try:
            size = int(self._fs.size(self.at(name)) or 0)
            size = size if end is None else min(size, end)
            if size - start > MOST_BYTES:
                raise DataError(f"{self.url}/{name}: {size >> 20} MiB are more than the viewer reads at once")
            return bytes(self._fs.cat_file(self.at(name), start=start, end=size)) if size > start else b""
        except FileNotFoundError:
            return None
        except OSError as error:
            raise DataError(f"{self.url}/{name} cannot be read: {first_line(error)}") from error

    def parquet(self, name: str) -> pq.ParquetFile:
        """Open a parquet file. Raises DataError for another file."""
        try:
            if self.is_local:
                return pq.ParquetFile(self.at(name), pre_buffer=False)
            return pq.ParquetFile(cast(IO[bytes], self._fs.open(self.at(name), "rb")))
        except (pa.ArrowException, OSError) as error:
            raise self.damaged(name, error) from error

    def dataset(self, name: str) -> ds.Dataset:
        """Open a parquet file such that only the requested columns and rows are read. Raises DataError."""
        try:
            return ds.dataset(self.at(name), format="parquet", filesystem=None if self.is_local else self._fs)
        except (pa.ArrowException, OSError) as error:
            raise self.damaged(name, error) from error

    def damaged(self, name: str, error: Exception) -> DataError:
        """Write the error for a parquet file that cannot be read."""
        return DataError(
            f"{self.url}/{name}: want a parquet file, but it cannot be read as one ({first_line(error)}). It was "
            f"damaged or cut after it was written: copy it again from the run (written by "
            f"{writer_in(self.read(RECORD))}), or remove it"
        )

    def at(self, name: str) -> str:
        """Address of a file or folder below, for fsspec."""
        return f"{self._root}/{name}" if name else self._root
