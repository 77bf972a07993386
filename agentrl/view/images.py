"""Files of recorded images as data addresses: of formats that show only pixels, and of bounded size."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable

from agentrl.errors import UserError
from agentrl.trajectory.files import DIGEST, IMAGES
from agentrl.trajectory.picture import Picture
from agentrl.view.folder import Folder

FORMATS = (
    (re.compile(rb"\x89PNG\r\n\x1a\n"), "png"),
    (re.compile(rb"\xff\xd8\xff"), "jpeg"),
    (re.compile(rb"GIF8[79]a"), "gif"),
    (re.compile(rb"RIFF....WEBP", re.DOTALL), "webp"),
    (re.compile(rb"BM"), "bmp"),
)
"""Beginnings of files, with the browsers' names of the formats."""
MOST_BYTES = 1 << 23
MOST_OF_ALL = 1 << 25
"""Largest file that is shown, and the most of one trajectory, in bytes."""


def pictures(folder: Folder, digests: Iterable[str]) -> dict[str, str]:
    """Read images of a run: `data:` addresses by digest. Missing ones and other formats are left out."""
    found: dict[str, str] = {}
    room = MOST_OF_ALL
    for digest in dict.fromkeys(digests):
        # A name out of a file is no path before it is known to be a digest.
        data = folder.read(f"{IMAGES}/{digest}", end=MOST_BYTES + 1) if DIGEST.fullmatch(digest) else None
        if data is None or len(data) > min(room, MOST_BYTES) or (kind := kind_of(data)) is None:
            continue
        room -= len(data)
        found[digest] = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
    return found


def kind_of(data: bytes) -> str | None:
    """Return the name of an image's format; None for other data, and for too many pixels to decode."""
    kind = next((name for beginning, name in FORMATS if beginning.match(data)), None)
    try:
        Picture(data)
    except UserError:
        return None
    return kind
