"""The index of the viewed data: a run's folder, or files written by generate, evaluate and verl.

It holds names and numbers by step; trajectories are read when they are asked for.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

import orjson
import pyarrow as pa
import yaml

from agentrl.errors import DataError
from agentrl.system.bounded_yaml import check_aliases, load_yaml
from agentrl.system.json_value import JSON, as_object
from agentrl.system.versions import RECORD, Writer, check_record, writers_in
from agentrl.trajectory.files import TRAJECTORIES, UPDATES, FileName
from agentrl.view.folder import Folder, Stamp
from agentrl.view.json_lines import JsonLines
from agentrl.view.parts import LINES, PIECE, Part, dumped, generated, recorded
from agentrl.view.tokens import TokenTexts, find_tokens

MOST_CONFIG = 1 << 18
MOST_KEYS = 5000
MOST_SHOWN = 500
"""Bytes of a config, its keys, and the characters of a value that is a list."""
KEPT = 4
MOST_KEPT = 1 << 28
"""Tables, and their bytes, that are kept of a run: neighbours are looked at one after the other."""
FRESH = 1.0
"""Seconds that an index serves before the folder is listed again."""
OF_SCORES = ("sources", "comparison")
"""Members of the numbers of `agentrl.evaluate` that are no numbers of a data source."""
WANTED = (
    "a run's folder (with config.yaml, metrics.jsonl or trajectories/), its trajectories/, a folder or file of JSON "
    "lines as verl dumps rollouts, or what agentrl.generate or agentrl.evaluate wrote"
)


class Run:
    """One thing that is viewed. Its parts and numbers are refreshed by `refresh`, from any thread."""

    def __init__(self, url: str, folder: Folder, kind: str, parts: Callable[[], list[Part]]) -> None:
        self.url, self.folder, self.kind = url, folder, kind
        self.name = url.rstrip("/").rpartition("/")[2] or url
        self.metrics = JsonLines(folder, "metrics.jsonl")
        self.alarms = JsonLines(folder, "alarms.jsonl")
        self.numbers: Mapping[str, JSON] = {}
        """Numbers by data source that `agentrl.evaluate` wrote."""
        self.given: TokenTexts | None = None
        """Tokenizer that the user named."""
        self._parts = parts
        self._lock = threading.Lock()
        self._listed = -FRESH
        self._names: dict[str, Part] = {}
        self._version = 0
        self._config: Mapping[str, JSON] | None = None
        self.writers: Sequence[Writer] = ()
        """The versions that wrote a run, the last of them last."""
        self._record: Stamp | None = None
        """The file that `writers` were read of."""
        self._written: Stamp | None = None
        """The file that `config` is read of: a run that resumes writes it again."""
        self._tokens: TokenTexts | None = None
        self._tables: OrderedDict[Hashable, pa.Table] = OrderedDict()

    def kept(self, key: Hashable, make: Callable[[], pa.Table]) -> pa.Table:
        """Return the table of a key, made again unless it is one of the last few and not large."""
        with self._lock:
            if key in self._tables:
                self._tables.move_to_end(key)
                return self._tables[key]
        table = make()
        if table.nbytes <= MOST_KEPT // KEPT:
            with self._lock:
                self._tables[key] = table
                while len(self._tables) > KEPT:
                    self._tables.popitem(last=False)
        return table

    def refresh(self) -> None:
        """List the folder again unless that was done just now. Raises DataError when it cannot be read."""
        with self._lock:
            if time.monotonic() - self._listed < FRESH:
                return
            found = sorted(self._parts(), key=lambda one: (one.step, one.set, one.name))
            names = {one.name: one for one in found}
            changed = names != self._names
            if self.kind == "run":
                files = self.folder.files()
                for lines, name in ((self.metrics, "metrics.jsonl"), (self.alarms, "alarms.jsonl")):
                    stamp = files.get(name)
                    changed |= lines.refresh(None if stamp is None else stamp.size)
                if (written := files.get("config.yaml")) != self._written:
                    self._config, self._tokens, self._written = None, None, written
                    changed = True
                if (record := files.get(RECORD)) != self._record:
                    self.writers, self._record = writers_in(self.folder.read(RECORD)), record
            self._names = names
            self._version += changed
            self._listed = time.monotonic()

    @property
    def version(self) -> int:
        """A number that grows when anything of the run changed."""
        return self._version

    @property
    def parts(self) -> list[Part]:
        """All files of trajectories, by step."""
        return list(self._names.values())

    def part(self, name: str) -> Part:
        """Look a part up. Raises DataError for an unknown name."""
        try:
            return self._names[name]
        except KeyError:
            raise DataError(
                f"{self.name}: no file of trajectories is called {name!r}; a step may be done anew"
            ) from None

    def of_step(self, set: str, step: int) -> list[Part]:
        """Return the parts of one set and step. Raises DataError without parts."""
        found = [one for one in self._names.values() if one.set == set and one.step == step]
        if not found:
            raise DataError(f"{self.name}: nothing is recorded of step {step} of {set!r}")
        return found

    @property
    def can_replay(self) -> bool:
        """True for a run on this machine, whose checkpoints may lie next to its trajectories."""
        return self.kind == "run" and self.folder.is_local

    @property
    def config(self) -> Mapping[str, JSON]:
        """Values of config.yaml by dotted key; empty without a readable config."""
        if (found := self._config) is None:
            text = self.folder.read("config.yaml", end=MOST_CONFIG + 1) if self.kind == "run" else None
            found = _config(text) if text is not None and len(text) <= MOST_CONFIG else {}
            self._config = found
        return found

    @property
    def tokens(self) -> TokenTexts:
        """How the run's token ids are read for people."""
        with self._lock:
            if self._tokens is None:
                self._tokens = self.given or find_tokens(self.folder, self.config)
            return self._tokens


def open_run(url: str, tokens: TokenTexts | None = None) -> Run:
    """Open the data at a path or an address. Raises DataError in words when it is nothing that can be shown.

    tokens: how its ids are read, where the tokenizer that is found by itself is not to be used.
    """
    folder = Folder(url)
    if not folder.exists():
        raise DataError(f"{url}: there is no such folder or file. Give {WANTED}")
    run = _open_file(url) if folder.is_file() else _open_folder(url, folder)
    run.given = tokens
    run.refresh()
    return run


def _open_folder(url: str, folder: Folder) -> Run:
    if (versions := folder.read(RECORD)) is not None:
        check_record(versions, f"{url.rstrip('/')}/{RECORD}")
    files, folders = folder.files(), folder.folders()
    above, _, name = url.rstrip("/").rpartition("/")
    if name == TRAJECTORIES and TRAJECTORIES not in folders:
        return _open_folder(above or ".", Folder(above or "."))  # files that belong to them lie next to them

    def of_run() -> list[Part]:
        updates = {name: f"{UPDATES}/{name}" for name in folder.files(UPDATES)}
        return recorded(folder.files(TRAJECTORIES), f"{TRAJECTORIES}/", updates)

    if TRAJECTORIES in folders or "metrics.jsonl" in files:
        return Run(url, folder, "run", of_run)
    found = _by_names(url, folder, files)
    if found is not None:
        return found
    if "config.yaml" in files:
        return Run(url, folder, "run", of_run)
    some = ", ".join(sorted({*files, *(f"{name}/" for name in folders)})[:6]) or "nothing"
    runs = [name for name in sorted(folders)[:50] if "metrics.jsonl" in folder.files(name)]
    advice = f" In it are runs: {url.rstrip('/')}/{runs[0]}" if runs else ""
    raise DataError(f"{url}: this is not a run; it holds {some}. Give {WANTED}.{advice}")


def _by_names(url: str, folder: Folder, files: Iterable[str]) -> Run | None:
    """Open a folder whose files' names reveal their kinds; None where they do not."""
    if any(FileName.read(name) for name in files):
        return Run(url, folder, "trajectories", lambda: recorded(folder.files()))
    if any(LINES.fullmatch(name) for name in files):
        return Run(url, folder, "dump", lambda: dumped(folder.files()))
    if any(PIECE.fullmatch(name) for name in files):
        return Run(url, folder, "generate", lambda: generated(folder, _only(folder.files(), PIECE.fullmatch)))
    return None


def _open_file(url: str) -> Run:
    above, _, name = url.rpartition("/")
    folder = Folder(above or ".")

    def stamp() -> dict[str, Stamp]:
        return _only(folder.files(), lambda one: one == name)

    if name.endswith(".jsonl"):
        return Run(url, folder, "dump", lambda: [Part("lines", "dump", 0, "", name, one) for one in stamp().values()])
    if name.endswith(".parquet"):
        if "ids" in folder.parquet(name).schema_arrow.names:
            found = recorded(stamp()) or [Part("file", "trajectories", 0, "", name, stamp()[name])]
            return Run(url, folder, "trajectories", lambda: found)
        return Run(url, folder, "generate", lambda: generated(folder, stamp()))
    if name.endswith(".json"):
        run = Run(url, folder, "evaluate", list)
        try:
            numbers = orjson.loads(folder.read(name) or b"")
        except orjson.JSONDecodeError as error:
            raise DataError(
                f"{url}: want the numbers that agentrl.evaluate wrote, but it is no JSON ({error})"
            ) from error
        parts = as_object(numbers)
        by_source = {
            **as_object(parts.get("sources")),
            **{name: parts[name] for name in parts if name not in OF_SCORES},
        }
        run.numbers = {source: as_object(one) for source, one in by_source.items()}
        if not any(run.numbers.values()):
            raise DataError(f"{url}: want the numbers that agentrl.evaluate wrote: an object by data source")
        return run
    raise DataError(f"{url}: nothing is known of such files. Give {WANTED}")


def _only(files: Mapping[str, Stamp], wanted: Callable[[str], object]) -> dict[str, Stamp]:
    return {name: stamp for name, stamp in files.items() if wanted(name)}


def _config(text: bytes) -> dict[str, JSON]:
    try:
        check_aliases(text)
        value = load_yaml(text)
        return dict(itertools.islice(_leaves(value, ""), MOST_KEYS)) if isinstance(value, dict) else {}
    except (yaml.YAMLError, ValueError):  # ValueError: too many aliases
        return {}


def _leaves(value: JSON, key: str) -> Iterator[tuple[str, JSON]]:
    if not isinstance(value, dict) or not value:
        is_small = not isinstance(value, int) or -(1 << 63) <= value < 1 << 63  # JSON's writer takes no larger one
        yield key, value if isinstance(value, str | int | float | None) and is_small else _text(value)
        return
    for name, one in value.items():
        yield from _leaves(one, f"{key}.{name}" if key else str(name))


def _text(value: object) -> str:
    """Write the beginning of a value."""
    pieces = json.JSONEncoder(default=str, skipkeys=True).iterencode(value)
    return "".join(one[:MOST_SHOWN] for one in itertools.islice(pieces, MOST_SHOWN))[:MOST_SHOWN]
