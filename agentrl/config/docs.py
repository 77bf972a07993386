"""`python -m agentrl.config.docs > docs/config.md`: the page of every key, from the schema."""

from __future__ import annotations

import itertools
import types
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.config.keys import leaf_keys
from agentrl.config.section import Section
from agentrl.config.sections.offline import EvaluateConfig, GenerateConfig
from agentrl.config.sections.sft import SFTConfig
from agentrl.config.sections.training import Config

HEAD = """\
# Every key

Lengths are in tokens, times in seconds. Set a key on the command line (`key=value`) or in a YAML file of your own
(`--config-path`, `--config-name`; it builds on ours with `defaults: [train, _self_]`). A key that does not exist, has
a value of the wrong kind, conflicts with another or could have no effect is an error that says so.

The defaults below are those of your own data and model. `data.train_files=quickstart` and
`actor_rollout_ref.model.path=quickstart`, which hold while you name no others, bring the values of `configs/recipe/`
with them.
"""


def page() -> str:
    """The whole page, in Markdown."""
    tables = [
        _table("python -m agentrl.train", Config),
        _table("python -m agentrl.sft", SFTConfig),
        _table("python -m agentrl.generate", GenerateConfig, "The keys of `python -m agentrl.train`, and:"),
        _table("python -m agentrl.evaluate", EvaluateConfig),
    ]
    return "\n".join([HEAD, *itertools.chain.from_iterable(tables)])


def _table(title: str, schema: type[Section], beside: str | None = None) -> list[str]:
    """`beside` those of training, where it is given: without the keys that both have."""
    known = {} if beside is None else leaf_keys(Config)
    rows = [
        f"| `{key}` | {_kind(field.annotation)} | {_default(field)} | {' '.join((field.description or '').split())} |"
        for key, field in leaf_keys(schema).items()
        if key not in known
    ]
    return [
        f"## `{title}`",
        "",
        *([beside, ""] if beside else []),
        "| key | kind | default | what it does |",
        "|---|---|---|---|",
        *rows,
        "",
    ]


def _kind(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else _kind(part) for part in arguments)
    if origin in (list, tuple):
        return f"list of {_kind(arguments[0])}"
    if origin is not None and arguments and origin is not dict:
        return _kind(arguments[0])
    return {str: "text", bool: "true, false", int: "integer", float: "number"}.get(annotation, "mapping")


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return "must be given"
    return "null" if value is None else f"`{str(value).lower() if isinstance(value, bool) else value}`"


if __name__ == "__main__":
    print(page(), end="")
