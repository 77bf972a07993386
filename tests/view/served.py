"""The viewer on loopback, and the browser that asks it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from agentrl.view.__main__ import configured, listening
from agentrl.view.replays import Replays
from agentrl.view.run import open_run
from agentrl.view.server import make_app
from agentrl.view.viewer import Viewer

TOKEN = "the-token"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
CHROMIUM = next((path for path in map(Path, ("/usr/bin/chromium", "/usr/bin/chromium-browser")) if path.exists()), None)
ARGUMENTS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@contextmanager
def serving(*runs: Path, follow: bool = False, replay: bool = False) -> Iterator[str]:
    """Serve runs on a free port of loopback; yields the address without the token."""
    viewer = Viewer([open_run(str(one)) for one in runs])
    replays = Replays(viewer) if replay else None
    app = make_app(viewer, TOKEN, follow=follow, replays=replays)
    with listening("127.0.0.1", 0) as listener:
        server = uvicorn.Server(configured(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()
            if replays is not None:
                replays.close()
