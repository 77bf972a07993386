"""Answers of tools: made of a tool's response, written in cassettes and journals, and refused without asking a tool."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

from agentrl.errors import DataError
from agentrl.system.call_journal import Codec, as_json
from agentrl.system.json_value import JSON
from agentrl.system.numbers import finite, number_of
from agentrl.system.plugin import nearest
from agentrl.system.threads import LONG_TEXT, beside_loop
from agentrl.tool import ErrorKind, ToolResponse
from agentrl.tool.arguments import ArgumentCheck
from agentrl.tool.truncation import NOT_SHOWN
from agentrl.trajectory import ToolAnswer
from agentrl.trajectory.picture import MAX_PIXELS, PIXELS_OF_A_CHARACTER, Picture, as_picture, pixels_of

if TYPE_CHECKING:
    from PIL.Image import Image


_DECODING = threading.Lock()
"""Held by threads that decode images, so that those of many answers need the memory of one."""


class WrongResponse(TypeError):
    """A tool's `execute` returned a value that its contract forbids."""


async def answer_of(response: object, begun: float, *, images: bool) -> ToolAnswer:
    """Make the answer of the response to a call that began at `begun` (`perf_counter`).

    Without `images` a note takes their place. Raises WrongResponse for a value that is no ToolResponse or has a part of
    another type, DataError for an image that cannot be read, or for more than MAX_PIXELS together.
    """
    if not isinstance(response, ToolResponse):
        raise WrongResponse(f"execute must return a ToolResponse, found {type(response).__name__} {response!r:.100}")
    if not isinstance(response.text, str):
        raise _wrong_part("text", "a text", response.text)
    if response.reward is not None and finite(response.reward) is None:
        raise _wrong_part("reward", "a finite number or None", response.reward)
    # The builtin class stands first because it answers at once, and an abstract one takes a microsecond.
    if not isinstance(response.metrics, (dict, Mapping)) or None in map(number_of, response.metrics.values()):
        raise _wrong_part("metrics", "a mapping of names to numbers", response.metrics)
    if not isinstance(response.files, (dict, Mapping)):
        raise _wrong_part("files", "a mapping of paths to base64", response.files)
    if not isinstance(response.images, (list, Sequence)) or isinstance(response.images, (str, bytes)):
        raise _wrong_part("images", "a list", response.images)
    shown = await _decoded(response.images) if images else ()
    unseen = len(response.images) - len(shown)
    return ToolAnswer(
        response.text + (NOT_SHOWN.format(unseen) if unseen else ""),
        reward=None if response.reward is None else float(response.reward),
        seconds=time.perf_counter() - begun,
        metrics={str(name): float(value) for name, value in response.metrics.items()},
        files=dict(response.files),
        images=shown,
    )


def _wrong_part(name: str, kind: str, found: object) -> WrongResponse:
    return WrongResponse(f"the {name} of its ToolResponse must be {kind}, found {found!r:.100}")


async def _decoded(images: Sequence[bytes | Picture | Image]) -> tuple[Picture, ...]:
    """Read image files, large ones outside the event loop.

    Raises DataError for a value that is no image, a damaged one, or too many pixels.
    """
    known = [cast("Image", image) if hasattr(image, "save") else as_picture(image) for image in images]
    if (pixels := sum(map(pixels_of, known))) > MAX_PIXELS:
        raise DataError(f"the images of an answer have {pixels} pixels together; at most {MAX_PIXELS} are taken")

    size = pixels // PIXELS_OF_A_CHARACTER

    def decode() -> tuple[Picture, ...]:
        with _DECODING if size >= LONG_TEXT else nullcontext():  # small images do not wait for large ones
            pictures = tuple(map(as_picture, known))
            for picture in pictures:
                picture.decode()
        return pictures

    return await beside_loop(size, decode)


def refusal(
    name: str, arguments: Mapping[str, JSON] | None, parse_error: str | None, checks: Mapping[str, ArgumentCheck]
) -> ToolAnswer | None:
    """Answer a call that no tool can be asked; None for a sound one.

    parse_error: why the call could not be read. checks: of the arguments of each tool.
    """
    if parse_error is not None or arguments is None:
        return ToolAnswer(parse_error or "the call has no arguments", ErrorKind.PARSE)
    if (check := checks.get(name)) is None:
        shown, known = name[:64], list(checks)
        problem = f"no tool {shown!r}{nearest(shown, known)}; available: {', '.join(known) or 'none'}"
        return ToolAnswer(problem, ErrorKind.UNKNOWN_TOOL)
    wrong = check(arguments)
    return None if wrong is None else ToolAnswer(wrong, ErrorKind.ARGUMENTS)


def over_limit(limit: int) -> ToolAnswer:
    """Answer a call after the first `limit` calls of its message."""
    return ToolAnswer(f"only the first {limit} tool calls of a message are run; call again.", ErrorKind.LIMIT)


def to_outcome(answer: ToolAnswer, *, is_fault: bool = False, is_code_error: bool = False) -> dict[str, object]:
    """Write an answer, or a fault whose text it has, as cassettes and journals keep it: uncut, images in base64.

    is_fault: of the infrastructure, or of the tool's code, which `is_code_error` says.
    """
    return {
        "text": answer.text,
        "reward": answer.reward,
        "metrics": answer.metrics,
        "error": answer.error,
        "is_fault": is_fault,
        "is_code_error": is_code_error,
        "seconds": answer.seconds,
        "files": answer.files,
        "images": [base64.b64encode(image.data).decode() for image in answer.images],
        **({"pieces": answer.pieces} if answer.pieces else {}),
    }


def from_outcome(outcome: Mapping[str, Any]) -> ToolAnswer:
    """Read the answer of `to_outcome`; earlier releases left out parts. Raises ValueError for an unknown error."""
    return ToolAnswer(
        outcome.get("text", ""),
        None if outcome.get("error") is None else ErrorKind(outcome["error"]),
        outcome.get("reward"),
        outcome.get("seconds", 0.0),
        metrics=outcome.get("metrics", {}),
        files=outcome.get("files", {}),
        images=tuple(Picture(base64.b64decode(image)) for image in outcome.get("images", ())),
        pieces=outcome.get("pieces", ""),
    )


ANSWERS: Codec[ToolAnswer] = Codec(
    lambda answer: as_json(to_outcome(answer)), lambda content: from_outcome(json.loads(content))
)
