"""What every starter of containers does: a class of tests for those of agentrl, and for one of yours."""

from __future__ import annotations

import asyncio
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.containers.contract import Container, Containers, Spec, Unfit
from agentrl.system.processes import Process

SECRET = "a-secret-of-the-contract"


class ContainersContract:
    """Subclasses have a fixture `starter`, which gives a starter that is open, and what it starts."""

    @pytest.fixture
    async def container(self, starter: tuple[Containers, Spec]) -> AsyncIterator[Container]:
        containers, spec = starter
        made = await containers.start(spec)
        yield made
        await made.stop()
        await containers.close()

    @staticmethod
    async def ran(container: Container, line: str, most: int = 1 << 20, stdin: bytes = b"") -> tuple[Process, str]:
        """Run a line of a shell; return the process and its output."""
        words = ["sh", "-c", line]
        process = await container.run(words, {"NAME": SECRET}, "/tmp", secret=SECRET, most=most)
        process.give(stdin)
        await asyncio.wait_for(process.ended(), 60)
        return process, bytes(process.tails[1]).decode()

    async def test_root_fills_it_and_a_user_without_rights_acts(self, container: Container, tmp_path: Path) -> None:
        archive = tmp_path / "in.tar"
        (tmp_path / "file").write_text("content")
        with tarfile.open(archive, "w") as out:
            out.add(tmp_path / "file", "tmp/place/file")
        script = "tar -xf - -C /; mkdir /tmp/open; chown 1000:1000 /tmp/open; chmod 444 /tmp/place/file"
        await container.prepare(script, archive)
        line = (
            "id -u; cat place/file; cat; echo $NAME; cp place/file open/copy; echo x >>place/file; rm -f place/file; "
            "mv place gone; cat place/file; exit 3"
        )
        process, said = await self.ran(container, line, stdin=b"given\n")
        assert process.status == 3
        assert [word for word in said.split() if word in ("1000", SECRET)] == ["1000", SECRET]
        assert said.startswith("1000\ncontentgiven\n") and said.endswith("content")
        taken = tmp_path / "out.tar"
        await container.take("/tmp/open", taken, 1 << 20)
        with tarfile.open(taken) as archived:
            member = archived.extractfile("./copy")
            assert member is not None and member.read() == b"content"

    async def test_a_script_that_fails_and_files_that_are_too_many(self, container: Container, tmp_path: Path) -> None:
        with pytest.raises(Unfit):
            await container.prepare("exit 3")
        await self.ran(container, "mkdir many; head -c 3000000 /dev/zero >many/file")
        with pytest.raises(Unfit):
            await container.take("/tmp/many", tmp_path / "out.tar", 1 << 20)

    async def test_what_a_program_leaves_is_killed(self, container: Container) -> None:
        line = "setsid sh -c 'while :; do date +%s%N >/tmp/alive; sleep .05; done' >/dev/null 2>&1 &"
        await self.ran(container, line)
        await container.settle()
        _, first = await self.ran(container, "cat alive")
        await asyncio.sleep(0.3)
        _, second = await self.ran(container, "cat alive")
        assert first == second

    async def test_output_has_a_bound(self, container: Container) -> None:
        process, _ = await self.ran(container, "yes", most=100_000)
        assert process.overran and process.status != 0

    async def test_a_program_that_is_not_there(self, container: Container) -> None:
        process = await container.run(["/not/there"], {"NAME": SECRET}, "/tmp", secret=SECRET, most=1 << 20)
        process.give(b"")
        await asyncio.wait_for(process.ended(), 60)
        assert process.status == 127

    async def test_containers_share_nothing_and_stop_twice(self, starter: tuple[Containers, Spec]) -> None:
        containers, spec = starter
        both = await asyncio.gather(containers.start(spec), containers.start(spec))
        await self.ran(both[0], "echo x >left")
        _, said = await self.ran(both[1], "ls")
        for one in (*both, both[0]):
            await one.stop()
        await containers.close()
        assert "left" not in said
