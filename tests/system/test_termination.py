"""SIGTERM in processes of their own: raised at once, when the work is done that it waits for, or when time is over."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import os, signal, sys, time
from agentrl.system.command import exit_status
from agentrl.system.termination import allow, defer, within_time

def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)

def work():
    {body}

sys.exit(exit_status(work))
"""


def said(body: str) -> tuple[int, str]:
    """Exit status and output of work in which these statements stand."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body)], capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ("sigterm(); print('not reached')", ""),
        ("defer(60); sigterm(); print('update', flush=True); allow(); print('not reached')", "update\n"),
        ("defer(60); sigterm(); print('update', flush=True); sigterm(); print('not reached')", "update\n"),
        ("defer(0.2); sigterm(); print('update', flush=True); time.sleep(60); print('not reached')", "update\n"),
        ("defer(0); sigterm(); print('not reached')", ""),
        ("defer(60); allow(); sigterm(); print('not reached')", ""),
    ],
    ids=["at_once", "when_done", "second", "time_is_over", "no_time", "done_before"],
)
def test_a_signal_waits_for_work_that_must_not_be_left_half_done(body: str, output: str) -> None:
    assert said(body) == (143, output)


def test_what_is_done_after_it_has_the_time_that_is_left() -> None:
    body = """
    try:
        sigterm()
    except KeyboardInterrupt:
        with within_time(60):
            print("saved")
        time.sleep(0.3)
        with within_time(0.2):
            time.sleep(60)
            print("not reached")
    """
    assert said(body) == (143, "saved\n")


def test_where_nobody_handles_it_the_time_is_nobodys() -> None:
    from agentrl.system.termination import allow, defer, within_time

    defer(1e-3)
    with within_time(1e-3):
        pass
    allow()
