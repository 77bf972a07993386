"""Pictures in messages: files of images as data sets and tools give them, checked before anything is decoded.

A message's content is text, or a list of parts {"type": "text", "text": ...} and {"type": "image", "image": Picture}.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from agentrl.errors import DataError
from agentrl.trajectory import Message

if TYPE_CHECKING:
    from PIL import Image as Pillow

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats whose decoders run no other program and are used on images from anywhere."""
MAX_PIXELS = 1 << 26
"""More are refused before they are decoded: a file of kilobytes may hold them."""
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file. Equal where the files are."""

    data: bytes = field(repr=False)
    size: tuple[int, int] = field(init=False, compare=False)
    """Width and height in pixels, as it is to be looked at."""
    digest: bytes = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Reads the header only. Raises DataError for what is no such file, or holds too many pixels."""
        with _opened(self.data) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"an image of {width} x {height} pixels; at most {MAX_PIXELS} are taken")
            turned = image.getexif().get(_ORIENTATION) in _TURNED
        object.__setattr__(self, "size", (height, width) if turned else (width, height))
        object.__setattr__(self, "digest", hashlib.blake2b(self.data, digest_size=16).digest())

    def __str__(self) -> str:
        return f"<image {self.size[0]}x{self.size[1]} {self.digest.hex()}>"

    def decode(self) -> Pillow.Image:
        """The pixels in RGB, the right way up. Raises DataError for a damaged file."""
        from PIL import ImageOps

        with _opened(self.data) as image:
            try:
                return ImageOps.exif_transpose(image).convert("RGB")
            except (OSError, SyntaxError, ValueError, EOFError) as error:
                raise DataError(f"the image is damaged: {error}") from error


def _opened(data: bytes) -> Pillow.Image:
    try:
        from PIL import Image as Pillow
    except ImportError as error:
        raise DataError("images need Pillow: pip install 'agentrl[vision]'") from error
    try:
        return Pillow.open(io.BytesIO(data), formats=FORMATS)
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError) as error:
        raise DataError(f"no image that can be read (formats: {', '.join(FORMATS)}): {error}") from error


def as_picture(image: Any) -> Picture:
    """A Picture of what a tool gives: one, the bytes of a file, or a Pillow image. Raises DataError."""
    if isinstance(image, Picture):
        return image
    if isinstance(image, bytes | bytearray | memoryview):
        return Picture(bytes(image))
    if hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, "PNG")
        return Picture(file.getvalue())
    raise DataError(f"expected an image (bytes of a file, a Pillow image or a Picture), found {type(image).__name__}")


def image_part(picture: Picture) -> dict[str, Any]:
    return {"type": "image", "image": picture}


def pictures_in(messages: Sequence[Message]) -> Iterator[Picture]:
    """In the order in which they stand."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(part.get("image"), Picture):
                    yield part["image"]


def text_of(content: Any) -> str:
    """A content for people and as plain text: each image is named."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(part.get("text") or str(part.get("image", "")) for part in content)


def joined(content: Any, text: str, *, before: bool = False) -> Any:
    """A content with `text` behind it, or before it."""
    if not isinstance(content, list):
        return text + content if before else content + text
    part = {"type": "text", "text": text}
    return [part, *content] if before else [*content, part]
