"""Differences between what two commits made, and which of them the table of aliases explains."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.system.json_value import JSON

ALIASES = Path(__file__).with_name("aliases.json")


@dataclass(frozen=True, slots=True)
class Aliases:
    """Changes of names that are meant, of one kind of name."""

    renamed: Mapping[str, str]
    """New names by old ones. The old one keeps working."""
    added: Sequence[str]

    @classmethod
    def read(cls, kind: str, file: Path = ALIASES) -> Aliases:
        """Read those of a kind: keys, metrics or columns."""
        found = json.loads(file.read_text(encoding="utf-8"))[kind]
        return cls(found["renamed"], found["added"])


NO_ALIASES = Aliases({}, ())


def differences(old: Mapping[str, JSON], new: Mapping[str, JSON], aliases: Aliases = NO_ALIASES) -> list[str]:
    """List the names that are gone, that are new, or whose values differ, a line each, without meant changes."""
    said = []
    for name, value in sorted(old.items()):
        now = aliases.renamed.get(name, name)
        if now not in new:
            said.append(f"- {name} = {_short(value)}" + (f" (as {now}, its alias)" if now != name else ""))
        elif new[now] != value:
            said.append(f"! {name}: {_short(value)} -> {_short(new[now])}")
    known = {*old, *aliases.renamed.values(), *aliases.added}
    said += [f"+ {name} = {_short(value)}" for name, value in sorted(new.items()) if name not in known]
    return said


def _short(value: JSON) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}..."
