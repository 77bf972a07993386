"""Names under data.*_files: parquet files, JSON lines, folders, patterns, and Hugging Face data sets."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.errors import DataError, first_line, install_extra

HUB = "hf:"
_HUB_NAME = re.compile(r"hf:(?P<path>[^:]+)(?::(?P<split>.+))?")
_JSON = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
_CSV = (
    'comma-separated values. Convert them: python -c "import pyarrow.csv, pyarrow.parquet; '
    'pyarrow.parquet.write_table(pyarrow.csv.read_csv({file}), {made})"'
)
_ARROW = (
    'an Arrow file. Of a saved data set name the folder, as hf:FOLDER; else convert it: python -c "import pyarrow, '
    'pyarrow.parquet; pyarrow.parquet.write_table(pyarrow.ipc.{open}({{file}}).read_all(), {{made}})"'
)
_FOUND = (
    (b"ARROW1", _ARROW.format(open="open_file")),
    (b"\xff\xff\xff\xff", _ARROW.format(open="open_stream")),
    (b"version https://git-lfs", "the pointer of Git LFS to a file that was not fetched: git lfs pull"),
    (b"{", "JSON lines by another name: let it end in .jsonl"),
    (b"[", "JSON by another name: let it end in .json"),
    (b"\x1f\x8b", "a gzip archive: unpack it, or let JSON lines in it end in .jsonl.gz"),
    (b"PAR1", "a parquet file that is cut or damaged: fetch or write it again"),
)
"""Beginnings of other files."""
_TRAIN, _TEST = re.compile(r"\btrain", re.IGNORECASE), re.compile(r"\b(test|val|dev|eval)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Table:
    """Rows in columns, read a batch at a time."""

    schema: pa.Schema
    rows: int
    bytes: int
    """On the disk."""
    batches: Callable[[list[str], int], Iterator[pa.RecordBatch]]
    """Reads the columns of these names in batches of at most so many rows. Raises the errors of reading."""
    content: Callable[[], str]
    """Hashes the content on the disk. Raises OSError."""


def expand(files: str | Sequence[str]) -> list[str]:
    """Expand folders and glob patterns to a list of files; names of Hugging Face data sets stay.

    Raises DataError for a pattern that matches nothing, and for a folder without data files or with some of two kinds.
    """
    found: list[str] = []
    for name in [files] if isinstance(files, str) else files:
        path = str(Path(name).expanduser())
        if name.startswith(HUB):
            found.append(name)
        elif Path(path).is_dir():
            found += _files_in(Path(path))
        elif glob.has_magic(path) and not Path(path).exists():
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                raise DataError(f"no data file matches the pattern {name} (working directory {Path.cwd()})")
            found += matches
        else:
            found.append(path)
    if not found:
        raise DataError("no data file is given: a key data.*_files or data.path is an empty list; no validation: null")
    return found


def is_json(file: str) -> bool:
    """Check whether a file is named as JSON lines or JSON are."""
    return not file.startswith(HUB) and file.lower().endswith(_JSON)


def _files_in(folder: Path) -> list[str]:
    files = sorted(str(path) for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))
    parquet, json_lines = [file for file in files if file.endswith(".parquet")], [*filter(is_json, files)]
    if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
        raise DataError(f"{folder} is a Hugging Face data set that was saved to disk: name it as {HUB}{folder}")
    if bool(parquet) == bool(json_lines):
        what = "parquet files and JSON files" if parquet else "no *.parquet, *.jsonl, *.json, and none with .gz behind"
        raise DataError(f"data folder {folder} holds {what}: name the files, e.g. with a pattern {folder}/**/*.parquet")
    names = [Path(file).name for file in parquet or json_lines]
    if any(map(_TRAIN.search, names)) and any(map(_TEST.search, names)):
        raise DataError(
            f"data folder {folder} holds files to train on and to test on ({', '.join(names[:8])}): name those "
            f"meant, e.g. with a pattern {folder}/train*"
        )
    return parquet or json_lines


def open_table(file: str) -> Table:
    """Open a parquet file or a Hugging Face data set.

    Raises DataError when it is missing or cannot be read as one.
    """
    if file.startswith(HUB):
        return _open_hub(file)
    path = Path(file)
    if not path.is_file():
        raise DataError(f"data file {file} {'is a folder' if path.is_dir() else 'does not exist'}")
    try:
        # A buffer, so that a column of a large row group is not read whole.
        parquet = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        schema, groups = parquet.schema_arrow, range(parquet.num_row_groups)
        # Arrow joins no dictionaries of different row groups inside lists and structs (polars' Categorical).
        apart = [[group] for group in groups] if any(map(_holds_dictionary, schema.types)) else [[*groups]]

        def batches(columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
            for some in apart:
                yield from parquet.iter_batches(rows, row_groups=some, columns=columns)

        return Table(schema, parquet.metadata.num_rows, path.stat().st_size, batches, lambda: hashed([path]))
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(no_parquet(file, error)) from error


def hashed(paths: Sequence[Path], *words: str) -> str:
    """Hash the content of files, and further words."""
    found = hashlib.sha256(repr(words).encode())
    for path in paths:
        with path.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def no_parquet(file: str, error: Exception) -> str:
    """Say what a file is that `error` kept from being read as parquet, and what to do with it."""
    if is_json(file) or file.startswith(HUB):
        return f"{file}: expected a parquet file, found {'JSON' if is_json(file) else 'a data set of Hugging Face'}"
    try:
        with Path(file).open("rb") as opened:
            head = opened.read(64)
    except OSError:
        head = b""
    found = next((found for begin, found in _FOUND if head.startswith(begin)), "")
    if not found and Path(file).suffix.lower() in (".csv", ".tsv"):
        found = _CSV
    if not found:
        return f"{file}: expected a parquet file, but it cannot be read as one: {error}"
    made = str(Path(file).with_suffix(".parquet"))
    return f"{file}: expected a parquet file, found {found.format(file=repr(file), made=repr(made))}"


def _holds_dictionary(column_type: pa.DataType) -> bool:
    """Check whether a type holds a dictionary-encoded one at some depth below it."""
    inside = [column_type.field(index).type for index in range(column_type.num_fields)]
    return any(pa.types.is_dictionary(one) or _holds_dictionary(one) for one in inside)


def _open_hub(name: str) -> Table:
    """Load `hf:owner/name[/config][:split]`, or a folder of a saved data set after `hf:`; the split is train."""
    try:
        import datasets
    except ImportError as error:
        raise DataError(f"{name}: Hugging Face data sets need a package: {install_extra('hub')}") from error
    match = _HUB_NAME.fullmatch(name)
    if match is None:
        raise DataError(f"{name}: expected hf:owner/name, hf:owner/name/config or hf:folder, each with :split behind")
    path, split = Path(match["path"]).expanduser(), match["split"] or "train"
    try:
        if (path / "dataset_info.json").exists() or (path / "dataset_dict.json").exists():
            saved = datasets.load_from_disk(str(path))
            if isinstance(saved, datasets.DatasetDict):
                saved = saved[split]
            elif match["split"] is not None:
                raise ValueError("it was saved as one split; leave the name of a split out")
        elif path.exists():
            saved = datasets.load_dataset(str(path), split=split)
        else:
            owner, _, rest = match["path"].partition("/")
            repository, _, config = rest.partition("/")
            saved = datasets.load_dataset(f"{owner}/{repository}".rstrip("/"), config or None, split=split)
        arrow = saved.with_format("arrow")
    except Exception as error:
        raise DataError(
            f"{name}: the data set cannot be loaded: {type(error).__name__}: {first_line(error):.500}"
        ) from error

    def batches(columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        for table in arrow.iter(batch_size=rows):
            yield from table.select(columns).combine_chunks().to_batches()

    schema: pa.Schema = arrow.features.arrow_schema.remove_metadata()
    files = [Path(one["filename"]) for one in saved.cache_files]
    return Table(schema, len(arrow), int(arrow.data.nbytes), batches, lambda: hashed(files, split))
