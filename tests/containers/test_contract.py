"""The contract, of the OCI command line and of the starter that docs/containers.md shows, with a kubectl of podman."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import pytest

from agentrl.config.registries import CONTAINERS
from agentrl.containers.command_line import CommandLine
from agentrl.containers.contract import Container, Containers, Spec
from tests.containers.conftest import LINE, Boxed
from tests.containers.contract import ContainersContract
from tests.e2e.test_docs import blocks

KUBECTL = """#!{python}
import json, pathlib, subprocess, sys
line, mounts, root, shared, log = json.loads({given!r})
words = sys.argv[1:]
with open(log, "a") as out:
    print(json.dumps(words), file=out)

def podman(*words, **more):
    return subprocess.run([*line, *words], **more).returncode

if words[0] == "apply":
    pod = json.load(sys.stdin)
    for one in pod["spec"]["containers"]:
        name, rights = pod["metadata"]["name"], one["securityContext"]
        folder = pathlib.Path(shared, name)
        folder.mkdir(exist_ok=True)
        drop = ["--cap-drop", "all"] if "capabilities" in rights else []
        limits = ["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1000:1000", "--network", "none"]
        place = ["--volume", f"{{folder}}:{{one['volumeMounts'][0]['mountPath']}}", "--label", "agentrl"]
        start = ["--user", str(rights["runAsUser"]), *drop, *limits, *place, *mounts, "--entrypoint", one["command"][0]]
        podman("run", "--detach", "--stop-timeout", "0", "--name", f"{{name}}-{{one['name']}}", *start, "--rootfs",
               root + ":O", *one["command"][1:], stdout=subprocess.DEVNULL)
elif words[0] == "exec":
    at = words.index("--")
    name, container = words[at - 3], words[at - 1]
    status = podman("exec", "-i", f"{{name}}-{{container}}", *words[at + 1:])
    if status:
        print(f"command terminated with exit code {{status}}", file=sys.stderr)
    sys.exit(status)
elif words[0] == "delete":
    podman("rm", "--force", "--ignore", *(f"{{words[2]}}-{{one}}" for one in ("root", "agent")),
           stdout=subprocess.DEVNULL)
"""


class TestCommandLine(ContainersContract):
    @pytest.fixture(params=["as podman", "as docker"])
    async def starter(self, boxed: Boxed, request: pytest.FixtureRequest) -> AsyncIterator[tuple[Containers, Spec]]:
        options = boxed()
        line = CommandLine()
        await line.open(options)
        assert line.is_podman
        line.is_podman = request.param == "as podman"
        assert options.image is not None
        yield line, Spec(options.image, options, "/tmp", (8011,))
        await line.close()

    async def test_the_programs_of_the_image_fill_it_with_three_capabilities(self, container: Container) -> None:
        """What stands in the way of a hostile `sh` is not the machine's root."""
        line = "grep -E '^Cap(Eff|Prm|Bnd)|^NoNew|^Seccomp:' /proc/self/status >/tmp/rights"
        await container.prepare(f"{line}; ! mount -t proc none /tmp; [ ! -w /proc/sys/kernel/core_pattern ]")
        _, said = await self.ran(container, "cat /tmp/rights")
        assert set(said.split()[1::2]) == {f"{0b1011:016x}", "1", "2"}
        _, said = await self.ran(container, "grep -E '^Cap(Eff|Prm|Inh|Amb)|^NoNew' /proc/self/status")
        assert said.split()[1::2] == ["0" * 16] * 4 + ["1"]


@pytest.mark.slice(1, "documents")
class TestKubernetes(ContainersContract):
    @pytest.fixture
    async def starter(
        self, boxed: Boxed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[tuple[Containers, Spec]]:
        options = boxed()
        (code,) = [text for text in blocks("docs/containers.md", "python") if "class Kubernetes" in text]
        (tmp_path / "my_containers.py").write_text(code)
        programs, shared = tmp_path / "programs", tmp_path / "shared"
        programs.mkdir()
        shared.mkdir()
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
        given = json.dumps([LINE, options.arguments, options.image, str(shared), str(tmp_path / "log")])
        (programs / "kubectl").write_text(KUBECTL.format(python=sys.executable, given=given))
        (programs / "kubectl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        found = cast(type[Containers], CONTAINERS.get(f"{tmp_path}/my_containers.py:Kubernetes"))
        assert options.image is not None
        containers = found()
        await containers.open(options)
        yield containers, Spec(options.image, options, "/tmp")
        calls = [json.loads(line)[0] for line in (tmp_path / "log").read_text().splitlines()]
        assert calls[0] == "version" and calls.count("apply") == calls.count("wait") <= calls.count("delete")
