"""Base class of every group of config keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pydantic import BaseModel, ConfigDict


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
