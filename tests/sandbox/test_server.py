"""The server over HTTP, in the best tier that this machine holds: answers, limits by name, files, languages, queue,
cancellation, notebooks, leaks.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import httpx
import pytest

from sandbox.languages import warm_for
from sandbox.server import announce, bound
from tests.naming import Names, assert_names
from tests.sandbox.servers import Server, encoded, run
from tests.waiting import until

TRACEBACK = """Traceback (most recent call last):
  File "{home}/main.py", line 2, in <module>
    1 / 0
    ~~^~~
ZeroDivisionError: division by zero
"""
LAST_WORDS = """import atexit, threading
atexit.register(lambda: print('last'))
threading.Thread(target=lambda: print('thread')).start()
"""


async def test_an_answer_has_sandboxfusions_shape(client: httpx.AsyncClient) -> None:
    answer = await run(client, "print(input() * 2)", stdin="ab\n")
    assert {"status", "message", "compile_result", "run_result", "executor_pod_name", "files"} <= set(answer)
    assert (answer["status"], answer["message"], answer["compile_result"], answer["files"]) == ("Success", "", None, {})
    result = answer["run_result"]
    assert (result["status"], result["return_code"], result["stdout"], result["stderr"]) == (
        "Finished",
        0,
        "abab\n",
        "",
    )
    assert 0 < result["execution_time"] < 5
    assert (await client.get("/v1/ping")).json() == "pong"


@pytest.mark.parametrize(
    ("code", "code_out", "said"),
    [
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit('bye')", 1, "bye\n"),
        ("x = 1\n1 / 0", 1, TRACEBACK),
        ("def f(:", 1, "SyntaxError"),
        ("import os; os.abort()", -6, ""),
        (LAST_WORDS, 0, ""),
    ],
)  # fmt: skip
async def test_a_warm_program_ends_as_a_cold_one(
    client: httpx.AsyncClient, code: str, code_out: int, said: str
) -> None:
    answer = await run(client, code)
    assert answer["run_result"]["return_code"] == code_out
    assert answer["status"] == ("Success" if code_out == 0 else "Failed")
    if said.startswith("Traceback") and (await client.get("/health")).json()["tier"].startswith("namespaces"):
        assert answer["run_result"]["stderr"] == said.format(home="/home/sandbox")
    else:
        assert said.split("\n")[-2 if said.endswith("\n") else -1] in answer["run_result"]["stderr"]
    if "atexit" in code:
        assert answer["run_result"]["stdout"] == "thread\nlast\n"


async def test_the_last_expression_is_shown_if_asked_for(client: httpx.AsyncClient) -> None:
    program = "x = 2\nprint('a')\nx * 21"
    assert (await run(client, program))["run_result"]["stdout"] == "a\n"
    assert (await run(client, program, show_last_expression=True))["run_result"]["stdout"] == "a\n42\n"
    assert (await run(client, "print('a')", show_last_expression=True))["run_result"]["stdout"] == "a\n"
    assert (await run(client, "if 1:\n    5", show_last_expression=True))["run_result"]["stdout"] == ""
    for wrong in ("x = 1\n1 / 0", "def f(:"):
        shown = [await run(client, wrong, show_last_expression=show) for show in (True, False)]
        assert shown[0]["run_result"]["stderr"] == shown[1]["run_result"]["stderr"] != ""


async def test_a_main_module_and_multiprocessing_work(client: httpx.AsyncClient) -> None:
    program = (
        "import asyncio, sys\n"
        "from concurrent.futures import ProcessPoolExecutor\n"
        "def square(n): return n * n\n"
        "if __name__ == '__main__':\n"
        "    with ProcessPoolExecutor(2) as pool: print(list(pool.map(square, range(4))))\n"
        "    print(asyncio.run(asyncio.sleep(0, 'async')), sys.argv[1:])\n"
    )
    answer = await run(client, program, args=["a", "b"])
    tier = (await client.get("/health")).json()["tier"]
    if tier.startswith("namespaces"):
        assert answer["run_result"]["stdout"] == "[0, 1, 4, 9]\nasync ['a', 'b']\n", answer


async def test_time_is_limited_and_named(client: httpx.AsyncClient) -> None:
    answer = await run(client, "print('before', flush=True)\nwhile True: pass", run_timeout=0.4)
    result = answer["run_result"]
    assert (answer["status"], result["status"], result["limits"]) == ("Failed", "TimeLimitExceeded", ["wall_time"])
    assert (result["stdout"], result["return_code"]) == ("before\n", None)
    assert answer["message"] == "limits reached: wall_time"
    assert 0.4 <= result["execution_time"] < 1.5


async def test_memory_of_the_request_counts(client: httpx.AsyncClient) -> None:
    program = "x = bytearray(b'1') * (200 << 20)\nprint(len(x) >> 20)"
    assert (await run(client, program, memory_limit_MB=64))["run_result"]["limits"] == ["memory"]
    assert (await run(client, program, memory_limit_MB=400))["run_result"]["stdout"] == "200\n"
    too_much = await client.post("/run_code", json={"code": "", "language": "python", "memory_limit_MB": 100_000})
    assert too_much.status_code == 422 and "--max-memory-mb" in too_much.text


async def test_long_output_is_cut_and_says_so(client: httpx.AsyncClient) -> None:
    answer = await run(client, "import sys\nprint('a' * 3_000_000)\nprint('e', file=sys.stderr)")
    result = answer["run_result"]
    assert (len(result["stdout"]), result["cut"], result["stderr"], result["return_code"]) == (
        1 << 20,
        ["stdout"],
        "e\n",
        0,
    )


async def test_output_that_is_not_utf8_survives(client: httpx.AsyncClient) -> None:
    answer = await run(client, "import os; os.write(1, b'a\\xff\\xed\\xa0\\x80b')")
    assert answer["run_result"]["stdout"].startswith("a\ufffd") and answer["run_result"]["stdout"].endswith("b")


async def test_files_go_in_and_come_out(client: httpx.AsyncClient) -> None:
    program = (
        "data = open('in/a.bin', 'rb').read()\nopen('out.bin', 'wb').write(data[::-1])\nimport helper; print(helper.x)"
    )
    files = {"in/a.bin": encoded(bytes(range(256))), "helper.py": encoded(b"x = 5"), "absent": None}
    answer = await run(client, program, files=files, fetch_files=["out.bin", "/tmp/none", "in"])
    assert answer["run_result"]["stdout"] == "5\n"
    assert answer["files"] == {"out.bin": encoded(bytes(range(256))[::-1])}
    assert set(answer["refused_files"]) == {"/tmp/none", "in"}


@pytest.mark.parametrize("path", ["../x", "/etc/x", "a/../../x", "", "a\0b", "\ud800"])
async def test_paths_that_lead_out_are_refused(client: httpx.AsyncClient, path: str) -> None:
    body = {"code": "", "language": "python", "files": {path: ""}}
    answer = await client.post("/run_code", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 422


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("bash", "for i in 4 2; do printf $i; done"),
        ("nodejs", "process.stdout.write(String(6 * 7))"),
        ("perl", "print 6 * 7"),
        ("cpp", '#include <cstdio>\nint main() { std::printf("%d", 42); }'),
    ],
)
async def test_other_languages_run_or_say_what_is_missing(client: httpx.AsyncClient, language: str, code: str) -> None:
    answer = await run(client, code, language)
    if language in (await client.get("/health")).json()["languages"]:
        assert answer["run_result"]["stdout"] == "42", answer
        assert (answer["compile_result"] is not None) == (language == "cpp")
    else:
        assert answer["status"] == "SandboxError" and "not available on this server: it has no" in answer["message"]


async def test_a_language_without_interpreter_is_a_clear_error(client: httpx.AsyncClient) -> None:
    available = (await client.get("/health")).json()["languages"]
    for language in {"R", "julia", "lua", "php"} - set(available):
        answer = await run(client, "", language)
        assert answer["status"] == "SandboxError" and f"{language} is not available" in answer["message"]
    assert (await client.post("/run_code", json={"code": "", "language": "cobol"})).status_code == 422


async def test_a_failed_compilation_runs_nothing(client: httpx.AsyncClient) -> None:
    if "cpp" in (await client.get("/health")).json()["languages"]:
        answer = await run(client, "int main() { return x; }", "cpp")
        assert (answer["status"], answer["run_result"]) == ("Failed", None)
        assert "not declared" in answer["compile_result"]["stderr"]


async def test_numbers_are_warm_and_random_streams_differ(client: httpx.AsyncClient) -> None:
    program = "import numpy, sympy\nprint(sympy.factor(sympy.Symbol('x')**2 - 1), numpy.random.rand())"
    said = {(await run(client, program))["run_result"]["stdout"] for _ in range(3)}
    assert len(said) == 3 and all(text.startswith("(x - 1)*(x + 1)") for text in said)


async def test_a_full_queue_says_when_to_come_back_and_shares_fairly(client: httpx.AsyncClient) -> None:
    async def one(name: str) -> httpx.Response:
        body = {"code": "import time; time.sleep(0.4)", "language": "python"}
        return await client.post("/run_code", json=body, headers={"x-client-id": name})

    greedy = [asyncio.create_task(one("greedy")) for _ in range(20)]
    await asyncio.sleep(0.25)
    modest = [asyncio.create_task(one("modest")) for _ in range(2)]
    statuses = [answer.status_code for answer in await asyncio.gather(*greedy)]
    assert [answer.status_code for answer in await asyncio.gather(*modest)] == [200, 200]
    assert statuses.count(429) >= 10 and statuses.count(200) + statuses.count(429) == 20
    refused = next(task.result() for task in greedy if task.result().status_code == 429)
    assert 1 <= int(refused.headers["retry-after"]) <= 60


async def test_a_client_that_goes_away_stops_its_program(client: httpx.AsyncClient, server: Server) -> None:
    before = server.processes()
    with pytest.raises(httpx.ReadTimeout):
        await client.post(
            "/run_code", json={"code": "while True: pass", "language": "python", "run_timeout": 60}, timeout=0.5
        )

    async def ended() -> bool:
        return (await client.get("/health")).json()["running"] == 0 and server.processes() <= before

    await until(ended)


@pytest.mark.parametrize(
    ("header", "status"), [(f"Content-Length: {1 << 40}", b"413"), ("Transfer-Encoding: chunked", b"411")]
)
async def test_bodies_are_bounded(client: httpx.AsyncClient, header: str, status: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    writer.write(f"POST /run_code HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
    assert (await reader.readline()).split()[1] == status
    writer.close()


async def test_a_notebook(client: httpx.AsyncClient) -> None:
    body = {
        "cells": ["a = 123", "a", "print(a); 1 / 0", "import numpy; numpy.arange(2)"],
        "fetch_files": ["x"],
        "files": {"x": "aGk="},
    }
    answer = (await client.post("/run_jupyter", json=body)).json()
    assert (answer["status"], answer["driver"]["status"], answer["files"]) == ("Success", "Finished", {"x": "aGk="})
    one, two, three, four = answer["cells"]
    assert (one["display"], two["display"], four["display"]) == (
        [],
        [{"text/plain": "123"}],
        [{"text/plain": "array([0, 1])"}],
    )
    assert three["stdout"] == "123\n" and three["error"][0]["ename"] == "ZeroDivisionError"
    assert not any("/sandbox/" in line for line in three["error"][0]["traceback"])
    slow = (await client.post("/run_jupyter", json={"cells": ["1", "while True: pass"], "total_timeout": 0.5})).json()
    assert (slow["status"], slow["driver"]["status"], len(slow["cells"])) == ("Failed", "TimeLimitExceeded", 2)


async def test_a_notebook_that_never_stops_talking_is_stopped(client: httpx.AsyncClient) -> None:
    answer = (await client.post("/run_jupyter", json={"cells": ["'x' * 999_000"] * 100})).json()
    assert (answer["status"], answer["driver"]["limits"]) == ("Failed", ["output"])
    assert 30 < len(answer["cells"]) < 40


@pytest.mark.parametrize(
    "files", [{"a": "", "a/b": ""}, {"main.py/x": ""}, {"x" * 300: ""}, {f"{n}": "" for n in range(900)} | {"0/x": ""}]
)
async def test_files_that_cannot_be_there_are_the_requests_fault(
    client: httpx.AsyncClient, files: dict[str, str]
) -> None:
    body = {"code": "", "language": "python", "files": files}
    answer = await client.post("/run_code", json=body)
    assert answer.status_code == 422 and isinstance(answer.json()["detail"], str)
    assert "/home" not in answer.text and "/tmp" not in answer.text


def test_a_program_is_not_parsed_by_the_server() -> None:
    source = "import numpy\n" + "a=1\n" * 500_000
    tracemalloc.start()
    try:
        assert warm_for(source) == "numpy"
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("source", "warm"),
    [
        ("print(1)", ""),
        ("import os, numpy as np", "numpy"),
        ("if x:\n    from numpy.linalg import norm", "numpy"),
        ("import os; import pandas", "numpy"),
        ("import numpy\nfrom sympy import *", "sympy"),
        ("x = 'numpy'\nimportant = numpy", ""),
        ("import" + " " * 100_000 + "numpy", "numpy"),
        (" " * 200_000 + "import", ""),
    ],
)
def test_the_warm_interpreter_is_guessed(source: str, warm: str) -> None:
    assert warm_for(source) == warm


async def test_nothing_is_left_after_hundreds_of_runs(client: httpx.AsyncClient, server: Server) -> None:
    programs = [
        "print(1)",
        "import os\nif os.fork() == 0:\n    import time; time.sleep(60)",
        "import os; os.kill(os.getpid(), 11)",
        "import subprocess; subprocess.Popen(['sleep', '60'])",
        "x = [open('/dev/null') for _ in range(100)]; open('f', 'w').write('x' * 100000)",
        "raise ValueError",
    ]

    def held() -> tuple[int, int]:
        pids = {server.process.pid, *server.processes()}
        fds = sum(len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids if Path(f"/proc/{pid}").exists())
        return len(pids), fds

    gate = asyncio.Semaphore(4)

    async def one(place: int) -> None:
        async with gate:
            await run(client, programs[place % len(programs)])

    await asyncio.gather(*(one(place) for place in range(12)))
    await asyncio.sleep(0.3)
    before, memory = held(), server.memory()
    started = time.monotonic()
    await asyncio.gather(*(one(place) for place in range(240)))
    print(f"{240 / (time.monotonic() - started):.0f} runs/s")
    await until(lambda: held() == before)
    assert server.memory() < memory + (8 << 20)
    groups = Path("/sys/fs/cgroup").glob(f"*/**/agentrl-sandbox-{server.process.pid}/run*")
    assert list(groups) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--port", "99999"], ("'99999'", "65535")),
        (["--host", "no.such.host.invalid"], ("no.such.host.invalid", "port 8080")),
        ([], "127.0.0.1 port"),  # taken
    ],
)
def test_where_it_cannot_listen_is_told_before_anything_begins(options: list[str], says: Names) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options = options or ["--port", str(taken.getsockname()[1])]
        command = [sys.executable, "-m", "sandbox.server", *options]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0 and ended.stdout == ""
    assert_names(ended.stderr, says)
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("host", "shown", "is_reached"),
    [("localhost", "127.0.0.1", False), ("::1", "[::1]", False), ("0.0.0.0", "0.0.0.0", True)],
)
def test_its_address_is_told_and_whether_other_machines_reach_it(
    host: str, shown: str, is_reached: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with bound(host, 0) as listener:
        announce(listener)
        port = listener.getsockname()[1]
    said = capsys.readouterr()
    assert_names(said.out, "sandbox:", f"http://{shown}:{port}")
    assert said.err.startswith(f"warning: {shown} can be reached from other machines") == is_reached
    assert is_reached or not said.err
