"""Choose the display that suits where a command's output goes."""

from __future__ import annotations

import os
import sys

from agentrl.observe.display import Display
from agentrl.observe.plain import PlainDisplay


def open_display(title: str) -> Display:
    """Make a live display where stdout is a terminal that can show it, else one of plain lines."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower().replace("-", "")
    if sys.stdout.isatty() and encoding == "utf8" and os.environ.get("TERM", "dumb") not in ("dumb", "unknown"):
        from agentrl.observe.terminal import RichDisplay

        return RichDisplay(title)
    return PlainDisplay(title)
