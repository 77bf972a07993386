"""Images of a request as servers take them: their files, and one token for each, which the server expands."""

from __future__ import annotations

import base64
from collections.abc import Sequence

from agentrl.engines.contract import RequestError
from agentrl.trajectory import PlacedImage


def with_one_token_each(ids: Sequence[int], images: Sequence[PlacedImage]) -> list[int]:
    """Keep only the first of the tokens of each image."""
    kept: list[int] = []
    start = 0
    for one in images:
        kept += ids[start : one.start + 1]
        start = one.start + one.image.tokens
    return [*kept, *ids[start:]]


def data_urls(images: Sequence[PlacedImage]) -> list[str]:
    """Write the images' files as URLs without their formats, which servers detect."""
    return [f"data:image;base64,{base64.b64encode(one.image.encoded).decode()}" for one in images]


def check_expanded(found: int | None, length: int, url: str) -> None:
    """Check the number of tokens that a server made of a prompt with images. Raises RequestError."""
    if found != length:
        raise RequestError(
            f"{url} makes {found} tokens of a prompt with images that has {length} here: it has another image "
            "processor than actor_rollout_ref.model.path"
        )
