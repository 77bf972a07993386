"""Names of chat formats. Importing this loads no tokenizer and no torch."""

from __future__ import annotations

from difflib import get_close_matches
from typing import get_args

FURTHER = ("auto", "none")
"""Names in addition to the families and the registered tool-call formats."""


def families() -> tuple[str, ...]:
    """List the families of the renderers package; imports the package.

    Without gpt-oss, which its own chat template writes: that renderer downloads a vocabulary.
    """
    from renderers import RendererConfig  # type: ignore[import-untyped]

    return tuple(
        name
        for config in get_args(get_args(RendererConfig)[0])
        if (name := config.model_fields["name"].default) not in ("auto", "default", "custom", "gpt-oss")
    )


def unknown_format(name: str, known: list[str]) -> str | None:
    """Write the message for a format that is no family and not among `known` tool-call formats; None for others.

    `name` is as the config has it, with `template:` before a tool-call format or without.
    """
    if name in FURTHER or name.removeprefix("template:") in (*known, "none"):
        return None
    found = families()
    if name in found:
        return None
    near = get_close_matches(name, [*FURTHER, *found, *known, *(f"template:{one}" for one in known)], 3, 0.5)
    return (
        f"multi_turn.format={name!r} is unknown; nearest: {', '.join(near) or 'none'}. Expected auto, a family "
        f"({', '.join(found)}), template:CALLS with one of {', '.join([*known, 'none'])}, or one of yours as "
        "package.module:object or path/to/file.py:object"
    )
