"""A fake hub: a loopback server that has one model, in the shape of the Hugging Face hub's API."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit

COMMIT = "1" * 40


@contextmanager
def fake_hub(name: str, folder: Path) -> Iterator[str]:
    """Serve the files of `folder` as the model `name`; gives the hub's address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            path = urlsplit(self.path).path
            file = folder / path.rpartition("/")[2]
            files = [
                {"type": "file", "path": one.name, "size": one.stat().st_size, "oid": _digest(one)}
                for one in _files(folder)
            ]
            if path == f"/api/models/{name}/tree/{COMMIT}":
                self._answer(json.dumps(files).encode())
            elif path in (f"/api/models/{name}", f"/api/models/{name}/revision/main"):
                about = {"id": name, "sha": COMMIT, "siblings": [{"rfilename": one["path"]} for one in files]}
                self._answer(json.dumps(about).encode())
            elif path.startswith(f"/{name}/resolve/") and file.is_file():
                self._answer(file.read_bytes(), ETag=f'"{_digest(file)}"')
            else:
                self._answer(b"{}", 404, **{"X-Error-Code": "EntryNotFound"})

        def _answer(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            headers |= {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, "Content-Type": "application/json"}
            for key, value in headers.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _files(folder: Path) -> list[Path]:
    return sorted(one for one in folder.iterdir() if one.is_file())


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
