"""Images in requests. They come in base64, as the file that they are; nothing is fetched."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, cast

from pydantic import BeforeValidator, InstanceOf

from agentrl.errors import UserError
from agentrl.trajectory import Message, Part
from agentrl.trajectory.picture import Picture

FORM = "an image is taken in base64 (data:image/png;base64,...; in Messages a base64 source), not by address or file id"


def read_image(value: object) -> Picture:
    """Read an image: a data URL, alone (Responses) or under `url` (Chat Completions), or Anthropic's source in base64.

    Raises ValueError for anything else, and for bytes that are no image.
    """
    match value:
        case {"type": "base64", "data": str(data)}:
            pass
        case str(url) | {"url": str(url)}:
            head, _, data = url.partition(",")
            if not (head.startswith("data:image/") and head.endswith(";base64")):
                raise ValueError(FORM)
        case _:
            raise ValueError(FORM)
    try:
        return Picture(base64.b64decode(data, validate=True))
    except UserError as error:
        raise ValueError(str(error)) from None


def as_sent(messages: Sequence[Message]) -> list[Message]:
    """Write a row's messages as a client of Chat Completions sends them, with images as data URLs."""
    sent = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            message = {**message, "content": [_part_as_sent(part) for part in content]}
        sent.append(message)
    return sent


def _part_as_sent(part: Part) -> Part:
    picture = part.get("image")
    if not isinstance(picture, Picture):
        return part
    url = f"data:image/{picture.format};base64,{base64.b64encode(picture.data).decode()}"
    return cast(Part, {"type": "image_url", "image_url": {"url": url}})


Image = Annotated[InstanceOf[Picture], BeforeValidator(read_image)]
