"""Configs that are read back from a run's folder, which anybody may have written: data, unless the user trusts them.

A key says in its declaration what a value makes a command use besides data (`Rule.uses`): code, commands, hosts,
variables, files to write. A config that is read back has no such value without `--trust`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from agentrl.config.keys import all_keys, defaults, entry_of, flatten, leaf_keys
from agentrl.config.rules import shown
from agentrl.config.section import Section
from agentrl.errors import ConfigError
from agentrl.system.bounded_yaml import UNREADABLE, check_aliases
from agentrl.system.json_value import JSON
from agentrl.system.versions import RECORD, writer_of

EVERY_KEY = "every_key"
"""The key by which a YAML file says that it holds every key: a default value in it does not count as given."""
OF_A_RUN = ("metrics.jsonl", "trajectories", "updates", "checkpoints", "policy")
"""Files and folders by one of which a folder is a run's."""
WRITTEN = "config.yaml"
"""Name of the config that a run writes."""
END = "...\n"
"""Last line of it."""
LEADS_ELSEWHERE = ("defaults", "hydra", "dialect")
"""Keys of a whole file that name other files, plugins, or code that reads the rest."""
_PACKAGE = re.compile(r"^\s*#\s*@package\b", re.MULTILINE)
TRUST = (
    "A config that is read back from a run is data. Give --trust if you trust whoever wrote it, since then it runs, "
    "asks and writes what it names; or set these keys yourself"
)


def is_read_back(file: Path) -> bool:
    """Check whether a config file lies in a run's folder, or holds every key, as runs write it."""
    if any((file.parent / name).exists() for name in OF_A_RUN):
        return True
    return bool(re.search(rf"^{EVERY_KEY}\s*:", file.read_text(encoding="utf-8", errors="replace"), re.MULTILINE))


def refuse_cut(file: Path) -> None:
    """Raise ConfigError where the config of a run was copied in part: the rest would be defaults, and another run.

    Runs that record their versions end their config with a line `...`, the end of a document in YAML.
    """
    text = file.read_bytes()
    signed = (file.parent / RECORD).exists()
    is_runs = file.name == WRITTEN and (signed or not text.strip() or text.startswith(EVERY_KEY.encode()))
    if not is_runs or (text.endswith(END.encode()) if signed else text.endswith(b"\n")):
        return
    raise ConfigError(
        f"{file} was copied in part: expected a last line {repr(END) if signed else 'that is whole'}, found "
        f"{text[-40:].decode(errors='replace')!r} at its end. {writer_of(file.parent)} wrote it. Copy the file again, "
        "or name another one"
    )


@contextmanager
def refusing_unreadable(where: Path | str) -> Iterator[None]:
    """Raise ConfigError for values that PyYAML fails at, under OmegaConf and Hydra, too."""
    try:
        yield
    except OmegaConfBaseException:  # which may be a ValueError as well, and is told in its own words
        raise
    except UNREADABLE as error:
        raise ConfigError(f"{where}: a value cannot be read: {error}") from error


def refuse_aliases(file: Path) -> None:
    """Raise ConfigError where few bytes of a run's config stand for more than a memory holds."""
    try:
        check_aliases(file.read_bytes())
    except (ValueError, YAMLError) as error:
        raise ConfigError(f"{file}: {error}; no run writes such a config") from None


def refuse_other_files(file: Path, overrides: Sequence[str]) -> None:
    """Raise ConfigError where a config that is read back leads to other files, or takes values from elsewhere."""
    with refusing_unreadable(file):
        found = OmegaConf.load(file)
    tree: JSON = OmegaConf.to_container(found, resolve=False)  # type: ignore[assignment]
    named = [f"{key}={shown(tree[key])}" for key in LEADS_ELSEWHERE if isinstance(tree, dict) and key in tree]
    named += [f"the value {text!r}" for text in _texts(tree) if "${" in text]
    named += ["a line `# @package`"] if _PACKAGE.search(file.read_text(encoding="utf-8")) else []
    groups = {text: text.lstrip("+~").partition("=")[0].partition("@")[0] for text in overrides}
    named += [f"{text}, from its folder {group}" for text, group in groups.items() if (file.parent / group).is_dir()]
    if named:
        raise ConfigError(f"{file}: {'; '.join(named)}: it leads to files or values elsewhere. {TRUST}")


def refuse_uses(file: Path, values: Mapping[str, JSON], schema: type[Section], typed: Collection[str]) -> None:
    """Raise ConfigError with each key of a config that is read back whose value is more than data.

    values: by dotted key, interpolations resolved, not validated yet.
    typed: keys and sections that the user set on the command line.
    """

    def is_typed(key: str) -> bool:
        return any(key == one or key.startswith(f"{one}.") for one in typed)

    found = [
        f"{key}={shown(value)} names {what}"
        for key, value, what in uses(values, schema, file.parent)
        if not is_typed(key)
    ]
    if found:
        raise ConfigError("\n".join([f"{file}:", *found, TRUST]))


def uses(values: Mapping[str, JSON], schema: type[Section], home: Path) -> Iterator[tuple[str, JSON, str]]:
    """Yield each key whose value names more than data, with the value and what it names."""
    default = flatten(defaults(schema), leaf_keys(schema))
    for path, key in all_keys(schema).items():
        if path not in values or (value := values[path]) == default[path]:
            continue
        for rule, _ in key.rules:
            if what := rule.uses(value, home):
                yield path, value, what
        if (entry := entry_of(key.field.annotation)) is not None and isinstance(value, Mapping):
            for name, inner in value.items():
                # A text stands for an entry's name (`ScorerConfig`).
                each = inner if isinstance(inner, Mapping) else {"name": inner}
                for below, own, what in uses(flatten(each, leaf_keys(entry)), entry, home):
                    yield f"{path}.{name}.{below}", own, what


def _texts(value: JSON) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
