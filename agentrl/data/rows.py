"""Conversion of one row of a file to a `Sample`, and placement of its images in its messages.

A row's `images` column has, as verl's, a list of {bytes, path}, of paths or of bytes; in a message `<image>` marks the
place of the next image. A content may also be a list of parts {"type": "text", "text": ...} and {"type": "image"}. An
image part takes the next image of the column, or its own, under `image`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.data.messages import Unfit, read_messages, without_nulls
from agentrl.errors import DataError
from agentrl.trajectory import Message, Part
from agentrl.trajectory.picture import Picture, image_part
from agentrl.trajectory.sample import AGENT_ALIASES, Sample

PLACEHOLDER = "<image>"


def read_prompt(row: Mapping[str, object], prompt_key: str) -> list[Message]:
    """Read the messages of a row's prompt. Raises DataError, naming the column."""
    try:
        return read_messages(row[prompt_key])
    except Unfit as bad:
        place = f"column {prompt_key}, {bad.place}".removesuffix(", ")
        raise DataError(f"{place}: expected {bad.expected}, found {bad.found}") from None


def to_sample(
    row: Mapping[str, object],
    *,
    prompt: list[Message],
    image_key: str | None,
    default_agent_loop: str,
    index: int,
    file: str,
    number: int,
) -> Sample:
    """Make a Sample of a prompt and the rest of its `row`, which has passed the checks of `columns`.

    number: its row in the file. Raises DataError for images that cannot be read, or not put into the messages.
    """
    values: Any = without_nulls(row)
    extra = values.get("extra_info", {})
    agent = values.get("agent_name") or extra.get("agent_name") or default_agent_loop
    return Sample(
        prompt=with_images(prompt, (values.get(image_key) if image_key else None) or [], Path(file).parent),
        data_source=values.get("data_source", "unknown"),
        agent_name=AGENT_ALIASES.get(agent, agent),
        ground_truth=values.get("reward_model", {}).get("ground_truth"),
        ability=values.get("ability"),
        tools_kwargs=values.get("tools_kwargs") or extra.get("tools_kwargs", {}),
        interaction_kwargs=values.get("interaction_kwargs") or extra.get("interaction_kwargs", {}),
        extra_info=extra,
        index=index,
        file=file,
        row=number,
    )


def with_images(messages: list[Message], images: Sequence[object], folder: Path) -> list[Message]:
    """Put a Picture into each place of the messages. Without images `<image>` is text.

    Raises DataError when images and places differ in number, an image cannot be read, or its path leads out of
    `folder`, the folder of the data file.
    """
    if not images and all(isinstance(message.get("content"), str | None) for message in messages):
        return messages
    rest = enumerate(images)
    filled = [_filled(message, rest, bool(images), folder) for message in messages]
    left = len(list(rest))
    if left:
        raise DataError(
            f"it has {len(images)} images, and its messages have places ({PLACEHOLDER}) for {len(images) - left}"
        )
    return filled


def _filled(message: Message, rest: Iterator[tuple[int, object]], any_images: bool, folder: Path) -> Message:
    content = message.get("content")
    if isinstance(content, str) and any_images and PLACEHOLDER in content:
        first, *others = content.split(PLACEHOLDER)
        parts: list[Part] = [_text(first)]
        for text in others:
            parts += [image_part(_next(rest, folder)), _text(text)]
        return {**message, "content": [part for part in parts if part.get("text") != ""]}
    if not isinstance(content, list):
        return message
    return {**message, "content": [_part(part, rest, folder) for part in content]}


def _part(part: Part, rest: Iterator[tuple[int, object]], folder: Path) -> Part:
    kind = part.get("type") or ("text" if "text" in part else None)
    if kind == "text":
        return {**part, **_text(part.get("text") or "")}
    if kind == "image":
        own = part.get("image")
        return {**part, **image_part(_next(rest, folder) if own is None else _picture(own, folder))}
    raise DataError(f"a message's content has a part of type {kind!r}; expected text or image")


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _next(rest: Iterator[tuple[int, object]], folder: Path) -> Picture:
    number, image = next(rest, (-1, None))
    if number < 0:
        raise DataError(f"its messages have more places ({PLACEHOLDER}) than it has images")
    try:
        return _picture(image, folder)
    except DataError as error:
        raise DataError(f"image {number} (the first is 0): {error}") from error


def _picture(image: object, folder: Path) -> Picture:
    if isinstance(image, dict):
        image = image.get("bytes") or image.get("path")
    if isinstance(image, bytes):
        return Picture(image)
    if not isinstance(image, str):
        raise DataError("expected its bytes or the path of its file, found neither")
    root = folder.resolve()
    path = (root / image).resolve()
    if not path.is_relative_to(root):
        raise DataError(
            f"the path {image} leads out of {root}, the folder of the data file: put the images below it, or store "
            "their bytes in the row"
        )
    try:
        return Picture(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
