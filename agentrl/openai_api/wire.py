"""Models of what clients send. Types are strict: nothing is converted.

A model declares the members that are used, and its place in the table of fields, which says what happens to all others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Annotated, ClassVar, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from agentrl.openai_api.errors import ApiError
from agentrl.openai_api.fields import USED, Api, Fate, row_of
from agentrl.system.json_value import JSON

DROPPED = ":dropped"
"""Tag of a list's member that is left out; tags of unions begin with a colon, which no field does."""
NO_KIND = "no kind"
MOST_DROPPED = 1024
_AROUND = 16
"""Lists and objects of a request around a call's arguments, at most."""
_VERSION = re.compile(r"_[0-9]{8}$")


@dataclass(slots=True)
class Reading:
    """One request while it is read, and the fields that were dropped from it."""

    api: Api
    strict: bool = False
    """True: an unknown member is refused, and so is one of a kind that is dropped."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Reasons by the name of what was dropped."""
    refused: set[str] = field(default_factory=set)
    """Names of members that are known, and refused."""

    def drop(self, name: str, why: str = "this endpoint does not know it") -> None:
        """Note that a member, or one of this kind, was left out; of the names of one request MOST_DROPPED at most."""
        if len(self.dropped) < MOST_DROPPED:
            self.dropped.setdefault(name, why)

    def stays(self, place: str, name: str, member: JSON) -> bool:
        """Say whether a member that is not used stays, to be refused. Raises ApiError for a hint of a wrong type."""
        row = row_of(self.api, place, name)
        if row is None:
            if not holds_nothing(member) and not self.strict:
                self.drop(name)
            return self.strict and not holds_nothing(member)
        if row.fate in (Fate.REFUSED, Fate.ELSEWHERE):
            if member is None or any(_same(member, one) for one in row.harmless):
                return False
            self.refused.add(name)
            return True
        if row.value is not None and member is not None:
            _check_type(row.value, member, name)
        if row.fate is Fate.HINT and not (member is None if row.value is not None else holds_nothing(member)):
            self.drop(name, row.why)
        return False


def _check_type(adapter: TypeAdapter[object], value: object, name: str) -> None:
    try:
        adapter.validate_python(value, strict=True)
    except ValidationError as error:
        raise as_api_error(error, name) from None


def _same(given: JSON, harmless: JSON) -> bool:
    """Compare JSON values; True is not 1."""
    return given == harmless and isinstance(given, bool) == isinstance(harmless, bool)


def holds_nothing(value: object) -> bool:
    """True for null, false, and containers that are empty or have only such members."""
    if isinstance(value, dict):
        return all(holds_nothing(member) for member in value.values())
    if isinstance(value, list):
        return all(holds_nothing(member) for member in value)
    return value is None or value is False or value == ""


class Wire(BaseModel):
    """Model without conversions. What happens to members that it does not declare stands in the table of fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)
    apis: ClassVar[str] = ""
    """APIs whose requests have it at its place."""
    place: ClassVar[str] = ""
    """Its place in the table."""
    known: ClassVar[frozenset[str]] = frozenset()
    """Members that it declares."""

    @classmethod
    def __pydantic_init_subclass__(cls, **more: object) -> None:
        cls.known = frozenset(field.alias or name for name, field in cls.model_fields.items())
        for api in vars(cls).get("apis", "").split():
            USED[api, cls.place] = USED.get((api, cls.place), frozenset()) | cls.known

    @model_validator(mode="before")
    @classmethod
    def _without_others(cls, value: object, info: ValidationInfo[Reading | None]) -> object:
        reading = info.context
        if not isinstance(value, dict) or reading is None or cls.model_config["extra"] == "allow":
            return value
        used = {name: member for name, member in value.items() if name in cls.known}
        others = (name for name in value if name not in cls.known and reading.stays(cls.place, name, value[name]))
        if (refused := next(others, None)) is not None:  # The first one is named, so no other one is read.
            used[refused] = value[refused]
        return used


class Dropped(BaseModel):
    """Member of a list that is left out for its kind. It keeps its place there, as paths in errors are the client's."""

    place: ClassVar[str]

    @model_validator(mode="before")
    @classmethod
    def _note(cls, value: object, info: ValidationInfo[Reading | None]) -> object:
        reading, kind = info.context, kind_of(value)
        if reading is None or reading.strict:
            raise PydanticCustomError("union_tag_invalid", "no member of this kind is known")
        row = row_of(reading.api, cls.place, kind)
        reading.drop(kind, *([] if row is None else [row.why]))
        return {}


def kind_of(value: object, default: str = "") -> str:
    """Return the kind of a list's member, without the date of its version; `default`: used without a type."""
    kind = value.get("type", default) if isinstance(value, dict) else getattr(value, "type", None)
    return _VERSION.sub("", kind) if isinstance(kind, str) else NO_KIND


def tagged(api: Api, place: str, default: str = "", **used: str) -> Discriminator:
    """Separate the kinds of a list's members into used, dropped and refused kinds.

    `used`: kinds (blanks between) by the tag of their model. `default`: kind of a member without a type.
    """
    tags = {kind: f":{tag}" for tag, kinds in used.items() for kind in kinds.split()}
    USED[api, place] = USED.get((api, place), frozenset()) | tags.keys()

    def tag(value: object) -> str:
        if isinstance(value, Dropped):
            return DROPPED
        kind = kind_of(value, default)
        row = None if kind in tags or kind == NO_KIND else row_of(api, place, kind)
        return DROPPED if row is not None and row.fate is Fate.HINT else tags.get(kind, f":{kind}")

    return Discriminator(tag)


Read = TypeVar("Read", bound=Wire)
Member = TypeVar("Member")
Listed = Annotated[list[Member], Field(fail_fast=True)]
"""List that is read up to its first wrong member: the errors of a million members take minutes and gigabytes."""


def parsed(body: bytes) -> JSON:
    """Parse a body. Raises ApiError."""
    try:
        value: JSON = from_json(body, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)  # Raises for 1e999, too, which is read as infinity.
    except ValueError as error:
        raise ApiError(400, f"The body is not valid JSON: {error}", code="invalid_json") from None
    return value


def is_sendable(value: JSON) -> bool:
    """Say whether a client can send a value of an answer back: no body with half a surrogate pair or deep nesting is
    read."""
    try:
        from_json(b"[" * _AROUND + json.dumps(value, allow_nan=False).encode() + b"]" * _AROUND)
    except (ValueError, RecursionError):
        return False
    return True


def validated(value: object, model: type[Read], reading: Reading) -> Read:
    """Check a parsed value. Raises ApiError naming the member that is wrong or not supported."""
    try:
        return model.model_validate(value, context=reading)
    except ValidationError as error:
        raise as_api_error(error, refused=reading.refused) from None


def as_api_error(error: ValidationError, within: str = "", refused: Collection[str] = ()) -> ApiError:
    """Make the answer to a request that does not fit its model.

    `within`: path of the value that was checked. `refused`: names of members that are known, and refused.
    """
    first = error.errors(include_url=False, include_context=False)[0]
    param = path_of((within, *first["loc"]) if within else first["loc"])
    where = param or "The body"
    if first["type"] == "extra_forbidden" and first["loc"][-1] in refused:
        message, code = f"{param}={short(first['input'])} is not supported by this endpoint", "unsupported_value"
    elif first["type"] == "extra_forbidden":
        message = f"{where}: this endpoint does not know the field, found {short(first['input'])}; leave it out"
        code = "unknown_parameter"
    elif first["type"] == "missing":
        message, code = f"{where}: the field is required", "missing_required_parameter"
    elif first["type"] == "union_tag_invalid":
        message = f"{where}: a part of this type is not supported, found {short(first['input'])}"
        code = "invalid_value"
    elif first["type"] in ("model_type", "dict_type"):
        message, code = f"{where}: expected an object, found {short(first['input'])}", "invalid_type"
    else:
        message = f"{where}: {first['msg'].removeprefix('Value error, ')}, found {short(first['input'])}"
        code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    return ApiError(400, f"{message}." if code == "unsupported_value" else message, param=param or None, code=code)


def path_of(location: Sequence[int | str]) -> str:
    """Format a location as `messages[0].content`; the tags of unions are left out."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith(":"):
            path += f".{part}" if path else part
    return path


_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 80
_REPR.maxlist = _REPR.maxdict = _REPR.maxlevel = 3


def short(value: object) -> str:
    """Write a value of a client's in at most 80 characters."""
    text = _REPR.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
