"""Base class of every group of config keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

Kind = Literal["fault", "no effect", "not installed", "remark"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule's judgement of a config."""

    text: str
    kind: Kind = "fault"
    """fault: the config is refused. no effect: the key does nothing with the others, and is refused where the user gave
    it. not installed: refused on this machine. remark: allowed, and seldom meant."""
    key: str = ""
    """The key with a rule of its own; empty where a section judges several."""
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.text}. {self.remedy}" if self.remedy else self.text


class Section(BaseModel):
    """A group of keys: unknown keys are refused, values are checked, and nothing changes after loading."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,  # experiment_name=20260101 is a name
        allow_inf_nan=False,
        protected_namespaces=(),
    )
    short_keys: ClassVar[Mapping[str, str]] = {}
    """Beginnings of keys of a whole config that the command line takes for longer ones."""
    ignored: ClassVar[type[Section] | None] = None
    """Another whole config, whose further keys may occur in YAML files of this one and are not read."""

    def findings(self) -> Iterator[Finding]:
        """Judge keys of this section together, where no rule of one key can."""
        return iter(())
