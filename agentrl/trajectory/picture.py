"""Pictures in messages: files of images as data sets and tools give them, checked before anything is decoded.

A message's content is text, or a list of parts {"type": "text", "text": ...} and {"type": "image", "image": Picture}.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING

from agentrl.errors import ConfigError, DataError, install_extra
from agentrl.trajectory.message import Content, Message, Part

if TYPE_CHECKING:
    from PIL import Image as Pillow

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Formats whose decoders run no other program and are used on images from anywhere."""
MAX_PIXELS = 1 << 26
"""Larger images are refused before they are decoded: a file of kilobytes may hold them."""
PIXELS_OF_A_CHARACTER = 16
"""Pixels that are decoded in the time in which a character of a text is encoded."""
_ORIENTATION = 0x0112
_TURNED = (5, 6, 7, 8)
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Pillow's transposition that turns an image of an EXIF orientation upright."""


@dataclass(frozen=True, slots=True)
class Picture:
    """An image file; two are equal where the files are."""

    data: bytes = field(repr=False)
    size: tuple[int, int] = field(init=False, compare=False)
    """Width and height in pixels, the right way up."""
    digest: bytes = field(init=False, compare=False, repr=False)
    format: str = field(init=False, compare=False, repr=False)
    """Form of the file as media types name it, e.g. `png`."""
    _orientation: int = field(init=False, compare=False, repr=False)
    """EXIF orientation: 1 is upright."""
    _is_rgb: bool = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Read the header only. Raises DataError for bytes that are no such file, or hold too many pixels."""
        with _opened(self.data) as image:
            width, height = image.size
            if width * height > MAX_PIXELS:
                raise DataError(f"an image of {width} x {height} pixels; at most {MAX_PIXELS} are taken")
            # The base class's: PNG's own reads all pixels first.
            orientation = pillow().Image.getexif(image).get(_ORIENTATION, 1)
            object.__setattr__(self, "_is_rgb", image.mode == "RGB")
            object.__setattr__(self, "format", str(image.format).lower())
        object.__setattr__(self, "size", (height, width) if orientation in _TURNED else (width, height))
        object.__setattr__(self, "_orientation", orientation)
        object.__setattr__(self, "digest", hashlib.blake2b(self.data, digest_size=16).digest())

    def __str__(self) -> str:
        return f"<image {self.size[0]}x{self.size[1]} {self.digest.hex()}>"

    def plain(self) -> bytes:
        """Return a file of the same pixels that every reader decodes alike: in RGB, and not to be turned."""
        return self.data if self._is_rgb and self._orientation == 1 else png(self.decode())

    def decode(self) -> Pillow.Image:
        """Decode the pixels to RGB, the right way up. Raises DataError for a damaged file."""
        with _opened(self.data) as image:
            try:
                upright = pillow().Transpose[_UPRIGHT[self._orientation]] if self._orientation in _UPRIGHT else None
                rgb = image.convert("RGB")
                return rgb if upright is None else rgb.transpose(upright)
            except (OSError, SyntaxError, ValueError, EOFError) as error:
                raise DataError(f"the image is damaged: {error}") from error


def pillow() -> ModuleType:
    """Import Pillow's module `Image`. Raises ConfigError where it is not installed."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ConfigError(f"images need Pillow: {install_extra('vision')}") from error
    return Image


def _opened(data: bytes) -> Pillow.Image:
    library = pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", library.DecompressionBombWarning)  # we have a limit of our own
            opened: Pillow.Image = library.open(io.BytesIO(data), formats=FORMATS)
        return opened
    except (OSError, SyntaxError, ValueError, library.DecompressionBombError) as error:
        why = str(error).partition(" <")[0]  # Pillow names the object in memory that it read from
        raise DataError(f"no image that can be read (formats: {', '.join(FORMATS)}): {why}") from error


def as_picture(image: Picture | bytes | bytearray | memoryview | Pillow.Image) -> Picture:
    """Make a Picture of a Picture, the bytes of a file, or a Pillow image. Raises DataError."""
    if isinstance(image, Picture):
        return image
    if isinstance(image, bytes | bytearray | memoryview):
        return Picture(bytes(image))
    if hasattr(image, "save"):
        return Picture(png(image))
    raise DataError(f"expected an image (bytes of a file, a Pillow image or a Picture), found {type(image).__name__}")


def png(image: Pillow.Image) -> bytes:
    """Encode the image as a PNG file."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def image_part(picture: Picture) -> Part:
    """Make the part of a message's content that shows the picture."""
    return {"type": "image", "image": picture}


def pictures_in(messages: Sequence[Message]) -> Iterator[Picture]:
    """Yield the pictures of messages in order."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if isinstance(part, dict) and isinstance(picture := part.get("image"), Picture):
                    yield picture


def text_of(content: Content) -> str:
    """Write a message's content as plain text, with a name for each image."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(part.get("text") or str(part.get("image", "")) for part in content)


def size_of(messages: Sequence[Message]) -> int:
    """Count the characters of the messages' contents, with their images as texts that take as long to work on."""
    texts = sum(len(text_of(message.get("content"))) for message in messages)
    return texts + sum(max(len(one.data), pixels_of(one) // PIXELS_OF_A_CHARACTER) for one in pictures_in(messages))


def pixels_of(image: Picture | Pillow.Image) -> int:
    """Count the pixels of an image."""
    width, height = image.size
    return width * height


def joined(content: Content, text: str, *, before: bool = False) -> Content:
    """Append `text` to a message's content, or put it before."""
    if not isinstance(content, list):
        return text + (content or "") if before else (content or "") + text
    part: Part = {"type": "text", "text": text}
    return [part, *content] if before else [*content, part]
