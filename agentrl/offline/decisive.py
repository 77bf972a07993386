"""Settings that the rows of an output file depend on."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from agentrl.config.keys import flatten, leaf_keys
from agentrl.config.load import config_to_dict
from agentrl.config.section import Section
from agentrl.data.sources import hash_files
from agentrl.system.json_value import JSON

SAMPLES, SAMPLE_BYTES = 256, 4096
"""Places of a file of weights that are hashed, and bytes of each."""


def decisive(config: Section, idle: Collection[str]) -> dict[str, JSON]:
    """Return all keys but the `idle` ones (patterns), with their values, and the content of the files that they name.

    Data, which have a fingerprint or ids of their own, and cassettes, which grow, are known by their names.
    """
    values = flatten(config_to_dict(config), leaf_keys(type(config)))
    chosen = {key: values[key] for key in values if not any(fnmatch.fnmatchcase(key, one) for one in idle)}
    named = (value for key, value in chosen.items() if not key.startswith("data.") and key != "tools.cassette_path")
    files = {file for value in named for text in _texts(value) for file in _files(text)}
    return {**chosen, **{f"content of {file}": hash_files([file]) for file in sorted(files)}}


def hash_weights(folder: Path) -> str:
    """Hash samples of the weights in a model's folder, as all of them may be read for minutes."""
    found = hashlib.sha256()
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        found.update(f"{file.name} {size}".encode())
        with file.open("rb") as opened:
            for place in range(SAMPLES):
                opened.seek(size * place // SAMPLES)
                found.update(opened.read(SAMPLE_BYTES))
    return found.hexdigest()


def _texts(value: JSON) -> Iterator[str]:
    """Iterate over the texts in a value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _files(text: str) -> Iterator[Path]:
    """Find the file that a text names, alone or as file.py:name."""
    for name in {text, text.partition(":")[0]}:
        with suppress(OSError, RuntimeError):  # a text that is too long for a name, or begins like a user's folder
            if (file := Path(name).expanduser()).is_file():
                yield file
