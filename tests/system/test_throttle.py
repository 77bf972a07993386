from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from agentrl.system.throttle import ThrottledWarnings


def test_what_recurs_is_said_ever_more_rarely_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    warnings = ThrottledWarnings(logging.getLogger("test"))
    for number in range(100):
        warnings.warn(f"trajectory {number}", f"no answer within {number} s")
    warnings.warn("trajectory 7", "something else")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 8  # 1, 2, 4, ... 64, and the other kind
    assert said[0] == "trajectory 0: no answer within 0 s"
    assert said[6] == "trajectory 63: no answer within 63 s (64 of this kind)"
    assert said[7] == "trajectory 7: something else"


def test_a_commands_warnings_obey_no_terminal() -> None:
    script = (
        "import logging\nfrom agentrl.system.command import exit_status\n"
        "exit_status(lambda: logging.getLogger('agentrl.x').warning('a program said %s', '\\x1b]0;owned\\x07'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "a program said \N{SYMBOL FOR ESCAPE}]0;owned\N{SYMBOL FOR BELL}\n"
