"""Construction of an index of corpora, and additions to one."""

from __future__ import annotations

import gzip
import os
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from agentrl.errors import ConfigError, DataError
from agentrl.system.publish import flush_to_disk, published_directory
from tools.documents import read_line
from tools.retriever.embed import Embedder, EmbeddingSpec
from tools.retriever.lexical import LexicalWriter
from tools.retriever.manifest import LOCK, DenseSpec, Manifest, read_manifest, sole_writer
from tools.retriever.milvus import Collection, MilvusIndex
from tools.retriever.store import Documents, PartSpec, PartWriter
from tools.retriever.words import Words

REPORT_EVERY = 1_000
"""Documents between two updates of the progress bar."""


def create(
    corpora: Sequence[Path],
    out: Path,
    *,
    language: str = "english",
    threads: int = 1,
    embedding: EmbeddingSpec | None = None,
) -> Manifest:
    """Make an index in the folder `out`, which appears when it is whole; with vectors where `embedding` names a model.

    Raises ConfigError when `out` is there already, DataError naming the file and line of a bad document.
    """
    _must_be_new(out)
    words = Words(language)
    embedder = Embedder(embedding) if embedding else None
    lock = out.with_name(f".{out.name}.lock")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{out} cannot be made: {error.filename}: {error.strerror}") from error
    with sole_writer(out, lock):
        try:
            _must_be_new(out)
            with published_directory(out) as folder:
                return _write(folder, None, corpora, words, threads, embedder)
        finally:
            lock.unlink()


def _must_be_new(out: Path) -> None:
    if out.exists() or out.is_symlink():
        raise ConfigError(f"{out.absolute()} exists already: name another folder, or use `add` to add to that index")


def add(corpora: Sequence[Path], folder: Path, *, threads: int = 1) -> Manifest:
    """Add documents to an index. Servers that have it open take up the new ones within seconds.

    Ids are not compared: a document added twice is found twice. Raises as `create` does, and ConfigError when another
    process is adding.
    """
    read_manifest(folder)
    with sole_writer(folder, folder / LOCK):
        old = read_manifest(folder)
        words = Words.from_spec(old.words)
        embedder = old.dense.embedder() if old.dense else None
        old.remove_others(folder)
        try:
            new = _write(folder, old, corpora, words, threads, embedder)
        except BaseException:
            old.remove_others(folder)
            raise
        new.remove_others(folder)
        return new


def load(corpora: Sequence[Path], path: Path, *, new: bool) -> int:
    """Put documents into the collection in Milvus that the file `path` names; make it where it is `new`. Returns how
    many.

    Raises ConfigError, DataError, EngineUnavailable; a new collection is then dropped, while an old one keeps what was
    added until then.
    """
    collection = Collection(path)
    spec = collection.spec
    embedder = Embedder(spec.embedding) if spec.embedding else None
    if new:
        collection.create(embedder.dimensions if embedder else None)
    else:
        MilvusIndex(collection)  # is as the file says
    try:
        documents = collection.insert(_documents(corpora, lambda: None), embedder)
        if not documents:
            raise _nothing_in(corpora)
        collection.ask("flush")
    except BaseException:
        if new:
            collection.ask("drop_collection")
        raise
    return documents


def _nothing_in(corpora: Sequence[Path]) -> DataError:
    return DataError(f"there is no document in {', '.join(map(str, corpora))}")


def _write(
    folder: Path,
    old: Manifest | None,
    corpora: Sequence[Path],
    words: Words,
    threads: int,
    embedder: Embedder | None,
) -> Manifest:
    generation = old.generation + 1 if old else 0
    lexical = folder / f"lexical-{generation}"
    if old:
        _link(folder / old.lexical, lexical)
    else:
        lexical.mkdir()
    first = old.documents if old else 0
    with LexicalWriter(lexical, words, threads) as writer, PartWriter(folder, f"documents-{generation}") as part:
        for identity, contents in _documents(corpora, writer.commit):
            row = first + part.documents
            part.add(str(row) if identity is None else identity, contents)
            writer.add(row, contents)
        if not part.documents:
            raise _nothing_in(corpora)
        spec = part.spec()
    parts = [*(old.parts if old else []), spec]
    dense = _embed(folder, old, parts, f"vectors-{generation}", embedder) if embedder else None
    for path in (
        spec.lines(folder),
        spec.starts(folder),
        *lexical.iterdir(),
        *([folder / dense.name] if dense else []),
    ):
        flush_to_disk(path)
    manifest = Manifest(generation=generation, words=words.spec, parts=parts, lexical=lexical.name, dense=dense)
    manifest.write(folder)
    return manifest


def _embed(folder: Path, old: Manifest | None, parts: Sequence[PartSpec], name: str, embedder: Embedder) -> DenseSpec:
    from tools.retriever.dense import write_vectors

    documents = Documents(folder, parts)
    first = old.documents if old else 0
    before = folder / old.dense.name if old and old.dense else None
    with _progress() as progress:
        task = progress.add_task("vectors", total=len(documents) - first, documents="0")

        def report(done: int) -> None:
            progress.update(task, completed=done, documents=f"{done:,}")

        write_vectors(before, folder / name, embedder, documents, first, report)
    return DenseSpec(name=name, embedding=embedder.spec, probe=embedder.probe())


def _link(source: Path, target: Path) -> None:
    """Copy an index by hard links. tantivy never changes a segment's file, but replaces those that list them."""
    target.mkdir()
    for path in source.iterdir():
        if path.suffix == ".lock":
            continue
        if path.suffix == ".json":
            shutil.copy2(path, target / path.name)
            continue
        try:
            os.link(path, target / path.name)
        except OSError:  # a file system without hard links
            shutil.copy2(path, target / path.name)


def _documents(corpora: Sequence[Path], finish: Callable[[], None]) -> Iterator[tuple[str | None, str]]:
    """Iterate over ids and contents of all lines.

    A progress bar on stderr also shows `finish`, called at the end.
    """
    with _progress() as progress:
        done = 0
        for path in corpora:
            with _opened(path) as (lines, size, position):
                task = progress.add_task(path.name, total=size, documents=f"{done:,}")
                number = 0
                for number, line in enumerate(lines, 1):
                    if number % REPORT_EVERY == 0:
                        progress.update(task, completed=position(), documents=f"{done:,}")
                    if line.strip():
                        yield read_line(line, f"{path} line {number}")
                        done += 1
                progress.update(task, completed=size, documents=f"{done:,}")
        if done:
            task = progress.add_task("writing the index", total=None, documents="")
            finish()
            progress.update(task, total=1, completed=1)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Iterable[bytes], int, Callable[[], int]]]:
    """Open a file of lines, also compressed by gzip: (lines, bytes on disk, function that returns the bytes read)."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            yield gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file, size, file.tell
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"corpus {path.absolute()} cannot be read: {error}") from error


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("{task.fields[documents]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))
