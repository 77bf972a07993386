"""The commands of docs/viewer.md, run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

PROJECT = Path(__file__).resolve().parents[2]
PAGE = (PROJECT / "docs" / "viewer.md").read_text(encoding="utf-8")
COMMANDS = [line for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S) for line in block.splitlines()]


@pytest.mark.slice(2, "documents")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(run: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "quickstart").symlink_to(run)
    python, *words = shlex.split(command)
    assert python == "python"
    whole = [sys.executable, *words, *([] if "--export" in words else ["--port", "0"])]
    environment = {**os.environ, "PYTHONPATH": str(PROJECT)}
    process = subprocess.Popen(
        whole, cwd=tmp_path, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    if "--export" in words:
        assert re.search(r"\.html: \d+ trajectories", line), process.stderr.read()
    else:
        address = re.search(r"http://\S+\?token=\S+", line)
        assert address is not None, process.stderr.read()
        assert "agentrl" in httpx.get(address[0], follow_redirects=True).text
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


def test_the_page_names_every_option_and_column() -> None:
    from agentrl.view.__main__ import parser
    from agentrl.view.export import TEXTS
    from agentrl.view.record import NUMBERS

    options = {one for action in parser()._actions for one in action.option_strings if one.startswith("--")}
    for option in options - {"--help", "--version"}:
        assert option in PAGE, option
    for name in (*TEXTS, *NUMBERS):
        assert f"`{name}`" in PAGE, name
