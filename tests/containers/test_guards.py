"""Guards against a policy that games its reward: each is attacked, from within the program's container or the check's.

One session makes all attacks of the program, and sends what it found to the policy, whose prompts are then read.
"""

from __future__ import annotations

import contextlib
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.agents.agent import AgentOptions
from agentrl.containers.command_line import CommandLine
from agentrl.containers.contract import Spec, Unfit
from agentrl.openai_api.endpoint import Endpoint
from tests.containers.conftest import Boxed
from tests.containers.contract import ContainersContract
from tests.containers.test_sessions import COMMAND, mine, todo
from tests.harnesses.conftest import Harnessed

ATTACKS = """
import re, socket, subprocess, urllib.error

def answer(path, body=None):
    here = re.match("http://[^/]+", os.environ["OPENAI_BASE_URL"])[0]
    asked = urllib.request.Request(here + path, body, {"content-type": "text/json"})
    try:
        return urllib.request.urlopen(asked, timeout=20).status
    except urllib.error.HTTPError as error:
        return error.code

def fails(act):
    try:
        act()
    except (OSError, subprocess.CalledProcessError) as error:
        return type(error).__name__
    return "it worked"

def connect(host, port):
    return lambda: socket.create_connection((host, port), timeout=2)

def shell(line):
    return lambda: subprocess.run(["sh", "-c", line], check=True, capture_output=True, timeout=20)

own = "/" + os.environ["OPENAI_BASE_URL"].split("/", 3)[3]
other, port = OTHER, PORT
found = {
    "own": answer(own + "/models"),
    "other session": answer(f"/{other}/v1/models"),
    "queue": answer("/v1/sessions"),
    "score": answer(own + "/feedback", b'{"score": 1}'),
    "result": answer(own + "/result", b'{"score": 1}'),
    "escaped path": answer(f"{own}/../../{other}/v1/models"),
    "machine": fails(connect("127.0.0.1", port)),
    "outside": fails(connect("1.1.1.1", 443)),
    "names": fails(lambda: socket.getaddrinfo("pypi.org", 443)),
    "interfaces": [name for _, name in socket.if_nameindex()],
    "way": fails(lambda: socket.socket(socket.AF_UNIX).connect("/run/agentrl/socket")),
    "system": fails(lambda: open("/usr/bin/new", "w")),
    "root": fails(lambda: open("/new", "w")),
    "setuid": fails(lambda: os.setuid(0)),
    "mount": fails(shell("mount -t tmpfs none /work")),
    "namespaces": fails(shell("unshare -rm true && echo 1 >/proc/sys/kernel/core_pattern")),
    "devices": fails(shell("mknod disk b 254 0")),
    "rights": dict(re.findall("((?:Cap|NoNew)[A-Za-z]+):\\s*(.*)", open("/proc/self/status").read())),
    "user": os.getuid(),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) > 1000),
    "told": sorted(name for name in os.environ if "REPORT" in name or "SECRET" in name),
    "row": json.dumps(sample),
    "tests": subprocess.run(
        ["find", "/", "/tmp", "/run", "/dev/shm", "-xdev", "-name", "hidden_test.py"], capture_output=True, text=True
    ).stdout.split(),
    "first process": [fails(lambda: open("/proc/1/environ")), fails(lambda: open("/proc/1/mem", "r+b"))],
}
subprocess.Popen(["sh", "-c", "while :; do echo left >/tmp/left; sleep 0.1; done"], start_new_session=True)
open("solution.py", "w").write(SOLUTION)
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": json.dumps(found)}]}).encode()
urllib.request.urlopen(urllib.request.Request(address, body, {"content-type": "text/json"})).read()
"""
SOLUTION = """
import os, socket
fake = "print('fake')"
for act in (
    lambda: open("tests/hidden_test.py", "w").write(fake),
    lambda: os.remove("tests/hidden_test.py"),
    lambda: os.rename("tests", "gone"),
    lambda: os.chmod("tests/hidden_test.py", 0o666),
    lambda: os.rename("solution.py", "tests/hidden_test.py"),
):
    try:
        act()
        print("it worked")
    except OSError:
        pass
for port in (8011, 8012, int(os.environ.get("PORT", 1))):
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1)
        print("connected")
    except OSError:
        pass
print(sorted(name for name in os.environ if "URL" in name), os.path.exists("/tmp/left"))
"""
HIDDEN = """
import subprocess, sys
said = subprocess.run([sys.executable, "solution.py"], capture_output=True, text=True).stdout
again = open("tests/hidden_test.py").read()
sys.exit(0 if said == "[] False\\n" and "sys.exit" in again else 1)
"""

REFUSED = ("PermissionError", "OSError", "ConnectionRefusedError", "CalledProcessError", "FileNotFoundError")


@pytest.fixture
def attacked(harnessed: Callable[..., Harnessed], options: Callable[..., AgentOptions]) -> Any:
    """Run the session of all attacks; return (what it found, its score)."""

    async def run(box: dict[str, Any]) -> tuple[dict[str, Any], float | None]:
        os.environ["SECRET_OF_THE_TRAINER"] = "abc"
        check = ["python3", "-S", "tests/hidden_test.py"]
        used = harnessed(options(box, command=COMMAND, check=check), lambda prompt: "5")
        endpoint = Endpoint()  # Sessions of other trajectories have an endpoint of the same process.
        await endpoint.start()
        try:
            port = int(endpoint.url.rpartition(":")[2])
            code = ATTACKS.replace("SOLUTION", repr(SOLUTION)).replace("OTHER, PORT", f"'token', {port}")
            hidden = [{"path": "tests/hidden_test.py", "text": HIDDEN}]
            (found,) = await used.run(todo(code, check_files=hidden))
        finally:
            await endpoint.close()
            del os.environ["SECRET_OF_THE_TRAINER"]
        assert found.failure is None, found.failure
        text = used.prompts()[1]
        return json.loads(text[text.index("{") : text.rindex("}") + 1]), found.score

    return run


SHIM = """
for name in ("mkdir", "chown"):
    path = pathlib.Path("bin", name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\\n/usr/bin/id -u >> /testbed/ran\\nexec /usr/bin/{name} "$@"\\n')
    path.chmod(0o755)
"""


@pytest.mark.slice(1, "hostile")
async def test_root_runs_no_program_that_was_left_in_a_folder_of_path(
    harnessed: Callable[..., Harnessed], options: Callable[..., AgentOptions]
) -> None:
    path = "PATH=/testbed/bin:/usr/bin:/bin"
    box = {"workdir": "/testbed", "arguments": ["--env", path]}
    used = harnessed(
        options(box, command=COMMAND, check=["sh", "-c", "[ -x bin/chown ] && [ ! -e ran ]"]), lambda _: "5"
    )
    (found,) = await used.run(todo(SHIM))
    assert (found.score, found.failure) == (1.0, None)


@pytest.mark.slice(1, "hostile")
@pytest.mark.parametrize("box", [{}, {"uidmap": "0:100000:65536"}], ids=["plain", "uidmap"])
async def test_attacks_of_a_program_and_of_what_it_left_find_nothing(attacked: Any, box: dict[str, Any]) -> None:
    found, score = await attacked(box)
    assert found["own"] == 200
    for name, status in (
        ("other session", 404),
        ("queue", 404),
        ("escaped path", 404),
        ("score", 403),
        ("result", 403),
    ):
        assert found[name] == status, name
    for name in ("machine", "outside", "way", "system", "root", "setuid", "mount", "namespaces", "devices"):
        assert found[name] in REFUSED, name
    assert found["names"] == "gaierror" and found["interfaces"] == ["lo"]
    assert found["user"] == 1000
    # What root needs to fill it stays in the bounding set, from which a process without new privileges gets nothing.
    assert found["rights"].pop("CapBnd") == f"{0b1011:016x}" and found["rights"].pop("NoNewPrivs") == "1"
    assert set(found["rights"].values()) == {"0" * 16} and len(found["rights"]) == 4
    assert found["processes"] == [] and found["told"] == [] and found["tests"] == []
    assert found["first process"] == ["PermissionError"] * 2
    assert not any(word in found["row"] for word in ("report_url", "check_files"))
    assert score == 1.0, "the code that the program left changed its judge, or knew an address"
    assert mine() == []


LEFT = {
    "programs of its own": (
        "mkdir /tmp/bin; cd /tmp/bin; for n in sh cat tar chmod; do "
        "printf '#!/usr/bin/dash\\nexit 126' >$n; done; /bin/chmod 755 *",
        None,
    ),
    "folders too deep for tar": (
        'python3 -S -c \'import os\nfor _ in range(100_000): os.mkdir("d"); os.chdir("d")\'',
        Unfit,
    ),
    "more files than can be taken in time": (
        "python3 -S -c 'import os\nfor n in range(301_000): os.close(os.open(str(n), os.O_CREAT))'",
        Unfit,
    ),
    "files that fill its memory": ("for n in $(seq 600); do head -c 1M /dev/zero >f$n || break; done", Unfit),
}


@pytest.mark.slice(0, "hostile")
@pytest.mark.parametrize(("line", "raised"), LEFT.values(), ids=LEFT.keys())
async def test_what_a_program_leaves_is_taken_or_unfit_and_no_fault(
    boxed: Boxed, tmp_path: Path, line: str, raised: type[Exception] | None
) -> None:
    """After a fault of the infrastructure a trajectory is left out: no program may choose that in place of a 0."""
    words = ["--env", "PATH=/tmp/bin:/usr/bin:/bin"]
    box = boxed(memory_megabytes=512, disk_megabytes=512, arguments=words, start_timeout=120)
    starter = CommandLine()
    await starter.open(box)
    assert box.image is not None
    container = await starter.start(Spec(box.image, box, "/tmp", (8011,)))
    try:
        await container.prepare("true")
        await ContainersContract.ran(container, line)
        with contextlib.nullcontext() if raised is None else pytest.raises(raised):
            await container.settle()
            await container.take("/tmp", tmp_path / "taken.tar", 1 << 30)
    finally:
        await container.stop()
        await starter.close()
    if raised is None:
        with tarfile.open(tmp_path / "taken.tar") as taken:
            assert "./bin/sh" in taken.getnames()
