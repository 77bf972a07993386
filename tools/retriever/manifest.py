"""Manifest of an index: one small file, replaced as a whole, that names all others.

The files it names never change. Adding writes new ones beside them (and hard links to what stays), then replaces the
manifest: a reader sees the index before or after, and an interrupted command leaves only files that nobody names.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import pydantic

from agentrl.errors import ConfigError
from agentrl.system.publish import published
from tools.retriever.embed import Embedder, EmbeddingSpec
from tools.retriever.store import PartSpec
from tools.retriever.words import WordsSpec

NAME = "retriever.json"
LOCK = "lock"
_OURS = re.compile(r"(documents|lexical|vectors)-\d+(\.jsonl|\.starts|\.scratch)?")
"""Names of an index's files, beside which there may be others in its folder."""
_SAME = 0.01
"""Difference that two machines' numbers of one vector may have."""


class DenseSpec(pydantic.BaseModel):
    """Vectors of an index."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    name: str
    embedding: EmbeddingSpec
    probe: list[float]
    """Result of `Embedder.probe()`: queries must be embedded by the same model."""

    def embedder(self) -> Embedder:
        """Load the model whose vectors these are. Raises ConfigError when it is not there, or another one."""
        embedder = Embedder(self.embedding)
        found = embedder.probe()
        if len(found) != len(self.probe) or any(
            abs(mine - theirs) > _SAME for mine, theirs in zip(found, self.probe, strict=True)
        ):
            raise ConfigError(
                f"embedding model {self.embedding.model} is another one than the index was made with: the vector of a "
                f"fixed text begins {found[:3]}, and then began {self.probe[:3]}. Give that model, or index anew"
            )
        return embedder


class Manifest(pydantic.BaseModel):
    """Files of one generation of an index."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    generation: int = pydantic.Field(ge=0)
    words: WordsSpec
    parts: list[PartSpec]
    lexical: str
    dense: DenseSpec | None = None

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(part.documents for part in self.parts)

    def write(self, folder: Path) -> None:
        """Replace the manifest of a folder."""
        with published(folder / NAME) as path:
            path.write_text(self.model_dump_json(indent=2))

    def remove_others(self, folder: Path) -> None:
        """Delete the files of other generations. Processes that have them mapped keep them until they let go."""
        kept = {self.lexical} | ({self.dense.name} if self.dense else set())
        kept |= {path.name for part in self.parts for path in (part.lines(folder), part.starts(folder))}
        for path in folder.iterdir():
            if path.name in kept or not _OURS.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder. Raises ConfigError when it is no index of this version."""
    try:
        return Manifest.model_validate_json((folder / NAME).read_bytes())
    except OSError as error:
        raise ConfigError(
            f"{folder.absolute()} is no index: {NAME} cannot be read ({error.strerror}). "
            "Make one with: python -m tools.retriever index CORPUS.jsonl OUT"
        ) from error
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise ConfigError(f"{folder / NAME}: {where}: {problem['msg']}. Index the corpus anew") from error


@contextmanager
def sole_writer(folder: Path, lock: Path) -> Iterator[None]:
    """Hold the file `lock`, which is made. Raises ConfigError when another process writes the index, or nobody can."""
    busy = ConfigError(f"{folder}: another process is writing this index; try again when it is done")
    try:
        with lock.open("wb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise busy from error
            if not lock.exists() or lock.stat().st_ino != os.fstat(file.fileno()).st_ino:
                raise busy  # removed by its last holder in this moment
            yield
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}") from error
