r"""Text of a policy in the prompt of another model, whose control tokens it must not spell: they would open messages.

The other model's vocabulary is not known, so nothing is looked up in one. Control tokens of chat models open with an
angle bracket (`<|im_end|>`, `</s>`, `<start_of_turn>`) or a square one (`[INST]`, `]~b]`), and no token is matched by
its first character alone.
"""

from __future__ import annotations

import re

_OPENS = re.compile(
    r"[<\uff1c\ufe64](?=\S)"
    r"|[\[\]\uff3b\uff3d](?=[^\s\d\\\"'`()\[\]{},.:;=<>+*-])"
)
"""First character of a possible control token: an angle bracket, or a square one before anything but space, digits and
punctuation. Characters that Unicode's compatibility forms (NFKC) turn into a bracket count, too."""


def escape_control_tokens(text: str) -> str:
    r"""Write the characters at which a control token could begin as JSON's escapes (\u003c for <).

    In JSON text the meaning stays the same.
    """
    return _OPENS.sub(lambda opening: f"\\u{ord(opening[0]):04x}", text)


def part_control_tokens(text: str) -> str:
    """Put a space after the characters at which a control token could begin, in text that is read as it is."""
    return _OPENS.sub(r"\g<0> ", text)
