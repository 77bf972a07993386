"""A real HTTP server that gives a model's log-probs of given tokens, as SGLang, vLLM and servers with echo do."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

Change = Callable[[dict[str, Any]], object]


class TeacherServer:
    """`bodies`: what was asked. `change`: what becomes of an answer; a number is a status without one."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(model)
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.change: Change = lambda answer: answer
        self.url = ""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["input_ids"] if path == "/generate" else body["prompt"]
        with torch.no_grad():
            table = self._model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)[:-1]
        own = table.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()

        def likeliest(count: int) -> list[list[tuple[float, int]]]:
            best = table.topk(count)
            rows = zip(best.values.tolist(), best.indices.tolist(), strict=True)
            return [list(zip(values, tokens, strict=True)) for values, tokens in rows]

        if path == "/generate":
            start = body["logprob_start_len"]
            pairs = [(None, ids[0], None), *((value, token, None) for value, token in zip(own, ids[1:], strict=True))]
            info: dict[str, Any] = {"input_token_logprobs": [(None, ids[start], None), *pairs[start + 1 :]]}
            if body["top_logprobs_num"]:
                tops = [[(value, token, None) for value, token in row] for row in likeliest(body["top_logprobs_num"])]
                info["input_top_logprobs"] = [None, *tops[start:]]
            return {"text": "", "meta_info": info}
        if body.get("echo"):
            return {"choices": [{"logprobs": {"token_logprobs": [None, *own], "tokens": list(map(str, ids))}}]}
        tables = []
        for value, token, row in zip(own, ids[1:], likeliest(max(body["prompt_logprobs"], 1)), strict=True):
            kept = row[: body["prompt_logprobs"]]
            tables.append({str(one): {"logprob": logprob} for logprob, one in kept} | {str(token): {"logprob": value}})
        return {"choices": [{"text": "x", "prompt_logprobs": [None, *tables]}]}


@contextmanager
def serving(model: Path) -> Iterator[TeacherServer]:
    """Serve a model on loopback."""
    teacher = TeacherServer(model)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            teacher.bodies.append(body)
            teacher.headers.append(dict(self.headers))
            answer = teacher.change(teacher.answer(self.path.removeprefix("/v1").replace("//", "/"), body))
            content = b'{"detail": "not here"}' if isinstance(answer, int) else json.dumps(answer).encode()
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with suppress(BrokenPipeError):  # after one refusal the other requests are given up
                self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    teacher.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield teacher
    finally:
        server.shutdown()
        server.server_close()
