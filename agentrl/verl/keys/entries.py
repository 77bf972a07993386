"""Entries of the table of verl's keys: the treatment of a key, or of all keys that match a pattern."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from agentrl.config.rules import Condition
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON

VERL_0_2 = "verl-0.2"
"""The dialect of verl 0.2 and its forks, whose code reads the same keys otherwise."""
Kind = Literal["same", "translated", "ignored", "unsupported"]
"""same: a key of ours with the same meaning. translated: other keys or values of ours replace it. ignored: accepted,
and without effect on the result. unsupported: it would change the result, and is not here."""
Values = Mapping[str, JSON]
"""Values of a whole config by dotted path, interpolations resolved."""


class Refusal(ConfigError):
    """A value that would change the result and is not here; the text says why."""


@dataclass(frozen=True, slots=True)
class VerlKey:
    """The treatment of one key of verl's, or of all keys that match a pattern."""

    pattern: str
    """Pattern of fnmatch, where * matches dots, too; of the keys that verl has, unless they are refused."""
    text: str
    """The note for an accepted value, which names the key's replacement, or the reason in the refusal of another value.
    """
    accepted: tuple[JSON, ...] | None = None
    """Values that are ignored; None: every value. Others are refused."""
    ours: tuple[str, ...] = ()
    """Our keys that the translation may set; empty: the key is ignored."""
    translate: Callable[[JSON, Values], dict[str, JSON]] | None = None
    """Returns values of our keys; empty where the value asks for nothing. Raises Refusal."""
    into: str | None = None
    """Our key whose mapping gets the value, by the rest of the name after the pattern's last dot."""
    is_loud: bool = False
    """The note is always shown, not only counted: the run is arranged differently than the command says. The note
    of a translated key has the values."""
    asks: Callable[[JSON, Values], bool] = lambda value, values: True
    """With `is_loud`: whether a value among the others is worth a note."""
    unread: Callable[[JSON, Values], bool] = lambda value, values: False
    """Check whether nothing reads the value, because of another key. A command that sets it is warned, and the note is
    the reason."""
    second_name_of: str = ""
    """The key, verl's or ours, that this one is another name of: a command that gives both has to give the same value.
    A * at its end stands for the rest of the name, as in the pattern."""

    @property
    def kind(self) -> Kind:
        """The kind of most values: an ignored key may be refused with others, and a translated one, too."""
        if self.translate is not None or self.into is not None:
            return "translated"
        return "unsupported" if self.accepted == () else "ignored"

    def matches(self, key: str) -> bool:
        """Check whether the entry is about this key."""
        return fnmatch.fnmatchcase(key, self.pattern)

    def first_name(self, key: str) -> str:
        """Return the one name by which all names of a key are compared."""
        if self.second_name_of.endswith("*"):
            return self.second_name_of[:-1] + key.removeprefix(self.pattern[:-1])
        return self.second_name_of or key

    @property
    def accepts_by_pattern(self) -> bool:
        """True where a misspelled key would be accepted unless it is looked up."""
        return "*" in self.pattern and self.kind != "unsupported"


def ignored(pattern: str, text: str, *, second_name_of: str = "") -> VerlKey:
    """Make an entry of a key that is accepted with any value, and has no effect of its own."""
    return VerlKey(pattern, text, second_name_of=second_name_of)


def without(switch: str, *asks_nothing: JSON) -> Callable[[JSON, Values], bool]:
    """Make a function that checks whether `switch` is off: a condition on another key of verl's, as `key=true`.

    `asks_nothing`: values that are no reason for a warning, with null and false.
    """
    condition = Condition.parse(switch)
    return lambda value, values: (
        value not in (None, False, *asks_nothing) and not condition.holds(values.get(condition.name))
    )


def consumed(pattern: str, switch: str) -> VerlKey:
    """Make an entry of a key that the translation of another one reads, `switch`, and nothing else."""
    condition = Condition.parse(switch)
    return VerlKey(pattern, f"read with {condition.text(condition.name)} alone", unread=without(switch))


def split(pattern: str, text: str, *quiet: JSON) -> VerlKey:
    """Make an entry of a key that splits models over devices differently from here; `quiet` values ask for nothing."""
    return VerlKey(pattern, text, is_loud=True, asks=lambda value, _: value not in quiet)


def fixed(pattern: str, text: str, *values: JSON) -> VerlKey:
    """Make an entry of a key that is accepted with these values alone."""
    return VerlKey(pattern, text, values)


def unsupported(pattern: str, text: str) -> VerlKey:
    """Make an entry of a key that is refused at any value."""
    return VerlKey(pattern, text, ())


def renamed(pattern: str, ours: str, text: str = "", *, off: tuple[JSON, ...] = (None,)) -> VerlKey:
    """Make an entry of a key that has another name here; values `off` ask for nothing."""
    return VerlKey(
        pattern,
        text or f"it is {ours} here",
        ours=(ours,),
        translate=lambda value, _: {} if value in off else {ours: value},
        second_name_of=ours,
    )


def gathered(pattern: str, into: str) -> VerlKey:
    """Make an entry of keys that are entries of a mapping here: of `into`, by their last names."""
    return VerlKey(pattern, f"it is {into} here", ours=(into,), into=into, second_name_of=f"{into}.*")


def translated(
    pattern: str,
    text: str,
    ours: tuple[str, ...],
    translate: Callable[[JSON, Values], dict[str, JSON]],
    *,
    is_loud: bool = False,
    asks: Callable[[JSON, Values], bool] = lambda value, values: True,
    unread: Callable[[JSON, Values], bool] = lambda value, values: False,
    second_name_of: str = "",
) -> VerlKey:
    """Make an entry of a key whose value is translated, perhaps by other values."""
    return VerlKey(
        pattern,
        text,
        ours=ours,
        translate=translate,
        is_loud=is_loud,
        asks=asks,
        unread=unread,
        second_name_of=second_name_of,
    )
