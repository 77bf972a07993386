"""Processes that are left when this one is gone are killed, and no others."""

from __future__ import annotations

import io
import subprocess
import threading

import pytest

from agentrl.system import processes


def test_two_threads_have_one_process_that_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[io.BytesIO]()
    watch = processes._Watch()
    other = threading.Thread(target=watch.tell, args=(2,))

    class Starts:
        def __init__(self, *_: object, **__: object) -> None:
            self.stdin = io.BytesIO()
            started.append(self.stdin)
            if len(started) == 1:
                other.start()
                other.join(0.2)  # it waits for the first one, or starts another at once

    monkeypatch.setattr(subprocess, "Popen", Starts)
    watch.tell(1)
    other.join()
    assert [one.getvalue() for one in started] == [b"1\n2\n"]
