"""Names under data.*_files: files, folders, patterns, and Hugging Face data sets."""

from __future__ import annotations

import glob
import hashlib
import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from agentrl.errors import DataError
from agentrl.system.parts import parts

HUB = "hf:"
TABLES = "tables"
"""Group of entry points: file name endings, each with a `table.RowTable` that reads such files."""
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


def kind_of(file: str) -> str:
    """Return `hf:`, `.json`, `.parquet`, or the ending that a distribution's entry point names; else an empty text."""
    if file.startswith(HUB):
        return HUB
    name = file.lower()
    ending = max((one for one in parts(TABLES) if name.endswith(one)), key=len, default="")
    return ending or (".json" if name.endswith(_JSON) else ".parquet" if name.endswith(".parquet") else "")


def _files_in(folder: Path) -> list[str]:
    kinds = defaultdict[str, list[str]](list)
    for path in sorted(folder.iterdir()):
        if path.is_file() and not path.name.startswith(".") and (kind := kind_of(str(path))):
            kinds[kind].append(str(path))
    if (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists():
        raise DataError(f"{folder} is a Hugging Face data set that was saved to disk: name it as {HUB}{folder}")
    if len(kinds) != 1:
        known = ", ".join(f"*{ending}" for ending in (".parquet", ".jsonl", ".json", *parts(TABLES)))
        what = " and ".join(f"*{kind} files" for kind in kinds) or f"no {known}, and none with .gz behind"
        raise DataError(f"data folder {folder} holds {what}: name the files, e.g. with a pattern {folder}/**/*.parquet")
    (found,) = kinds.values()
    names = [Path(file).name for file in found]
    if any(map(_TRAIN.search, names)) and any(map(_TEST.search, names)):
        raise DataError(
            f"data folder {folder} holds files to train on and to test on ({', '.join(names[:8])}): name those "
            f"meant, e.g. with a pattern {folder}/train*"
        )
    return found


def hash_files(paths: Sequence[Path], *words: str) -> str:
    """Hash the content of files, and further words."""
    found = hashlib.sha256(repr(words).encode())
    for path in paths:
        with path.open("rb") as opened:
            found.update(hashlib.file_digest(opened, "sha256").digest())
    return found.hexdigest()


def no_parquet(file: str, error: Exception) -> str:
    """Say the likely kind of a file that `error` kept from being read as parquet, and the remedy."""
    if (kind := kind_of(file)) in (".json", HUB):
        return f"{file}: expected a parquet file, found {'JSON' if kind == '.json' else 'a data set of Hugging Face'}"
    try:
        with Path(file).open("rb") as opened:
            head = opened.read(64)
    except OSError:
        head = b""
    found = next((found for begin, found in _FOUND if head.startswith(begin)), "")
    if not found and Path(file).suffix.lower() in (".csv", ".tsv"):
        found = _CSV
    if not found:
        own = "a format of yours: docs/data.md, A data set and an order of your own"
        return f"{file}: expected a parquet file, but it cannot be read as one ({own}): {error}"
    made = str(Path(file).with_suffix(".parquet"))
    return f"{file}: expected a parquet file, found {found.format(file=repr(file), made=repr(made))}"
