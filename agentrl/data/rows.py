"""One row of a file as a `Sample`: its columns, the check of its values, and the places of its images in its messages.

A row's `images` column has, as verl's, a list of {bytes, path}, of paths or of bytes; in a message `<image>` marks the
place of the next image. A content may also be a list of parts {"type": "text", "text": ...} and {"type": "image"}. An
image part takes the next image of the column, or its own, under `image`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.data.bad_rows import located
from agentrl.data.messages import Unfit, read_messages, without_nulls
from agentrl.errors import DataError
from agentrl.trajectory import Message, Part
from agentrl.trajectory.picture import Picture, image_part
from agentrl.trajectory.sample import Sample
from agentrl.trajectory.trajectory import NO_SOURCE

PLACEHOLDER = "<image>"


class Columns:
    """The columns of a row that a sample is made of, by a file's names for them."""

    def __init__(
        self,
        prompt: str = "prompt",
        images: str | None = "images",
        data_source: str = "data_source",
        reward_model: str = "reward_model",
    ) -> None:
        self.prompt, self.images, self.data_source, self.reward_model = prompt, images, data_source, reward_model
        self._texts = (data_source, "ability", "agent_name")
        self._mappings = (reward_model, "tools_kwargs", "interaction_kwargs", "extra_info")
        self._but_prompt = [name for name in (images, *self._texts, *self._mappings) if name is not None]
        self.names = [prompt, *self._but_prompt]
        """All columns that are read."""

    def check(self, row: Mapping[str, object]) -> None:
        """Raise Unfit, naming the column, for a value that no row can have there; the prompt has a check of its own."""
        if row.get(self.data_source, "") is None:
            raise Unfit(f"column {self.data_source}", "text", None)
        if self.images is not None and not isinstance(row.get(self.images), list | None):
            expected = "a list of images (if it holds something else, set data.image_key=null)"
            raise Unfit(f"column {self.images}", expected, row[self.images])
        extra = row.get("extra_info")
        inside = extra if isinstance(extra, Mapping) else {}
        for name in self._texts:
            _check_text(row.get(name), name)
        _check_text(inside.get("agent_name"), "extra_info.agent_name")
        for name in self._mappings:
            _check_mapping(row.get(name), name)
        _check_mapping(inside.get("interaction_kwargs"), "extra_info.interaction_kwargs")
        _check_mapping(inside.get("tools_kwargs"), "extra_info.tools_kwargs")
        for name, kwargs in (
            ("tools_kwargs", row.get("tools_kwargs")),
            ("extra_info.tools_kwargs", inside.get("tools_kwargs")),
        ):
            for tool, own in kwargs.items() if isinstance(kwargs, Mapping) else ():
                _check_mapping(own, f"{name}.{tool}", "a mapping such as {create_kwargs: {...}}")

    def messages(self, row: Mapping[str, object]) -> list[Message]:
        """Read the messages of a row's prompt. Raises Unfit, naming the column."""
        try:
            return read_messages(row[self.prompt])
        except Unfit as bad:
            raise located(f"column {self.prompt}", bad) from None

    def sample(self, row: Mapping[str, object], prompt: list[Message]) -> tuple[Sample, list[object]]:
        """Make a Sample of a prompt and the rest of its `row`, and list the images, which are not yet in the prompt.

        Its `agent_name` is as the row has it, "" without one. Raises Unfit for a row that does not pass `check`.
        """
        self.check(row)
        values: Any = without_nulls({name: row[name] for name in self._but_prompt if name in row})
        extra = values.get("extra_info", {})
        sample = Sample(
            prompt=prompt,
            data_source=values.get(self.data_source, NO_SOURCE),
            agent_name=values.get("agent_name") or extra.get("agent_name") or "",
            ground_truth=values.get(self.reward_model, {}).get("ground_truth"),
            ability=values.get("ability"),
            tools_kwargs=values.get("tools_kwargs") or extra.get("tools_kwargs", {}),
            interaction_kwargs=values.get("interaction_kwargs") or extra.get("interaction_kwargs", {}),
            extra_info=extra,
        )
        return sample, (values.get(self.images) if self.images else None) or []


def _check_text(value: object, name: str) -> None:
    if value is not None and not isinstance(value, str):
        raise Unfit(f"column {name}", "text", value)


def _check_mapping(value: object, name: str, expected: str = "a mapping") -> None:
    if value is not None and not isinstance(value, Mapping):
        raise Unfit(f"column {name}", expected, value)


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
