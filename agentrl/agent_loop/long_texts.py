"""Long texts are written as tokens in threads, so that the event loop goes on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from agentrl.system.threads import DaemonThreads
from agentrl.trajectory import Message
from agentrl.trajectory.picture import pictures_in, text_of

T = TypeVar("T")
LONG_TEXT = 16_384
"""Characters of text, and bytes of images, from which on messages are written in a thread: encoding as many takes about
the 5 ms that the interpreter leaves a thread before another one may run, as with `chat.LONG_TURN` for parsing."""
_WRITING = DaemonThreads("writing of long messages")


def size_of(messages: Sequence[Message]) -> int:
    """Number of characters of the messages' contents, and of bytes of their images."""
    size = 0
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            size += len(content)
        elif content is not None:
            size += len(text_of(content)) + sum(len(picture.data) for picture in pictures_in([message]))
    return size


async def beside_loop(size: int, write: Callable[[], T]) -> T:
    """Return `write()`, called in a thread where there are LONG_TEXT or more of what it writes.

    It must change nothing that others read: a caller that is cancelled leaves it running.
    """
    return write() if size < LONG_TEXT else await _WRITING.run(write)
