"""Names that code of a config registers end with its run, and come again with that code."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from agentrl.agent_loop.registry import agent_names, load_agent_loops
from agentrl.config.columns import COLUMNS, is_users, register_column
from agentrl.config.registries import AGENT_LOOPS, CALL_FORMATS, POLICY_LOSSES
from agentrl.errors import ConfigError
from agentrl.system.registrations import of_one_run
from agentrl.system.targets import load_target
from tests.naming import naming

LOSS = """
import helper_of_the_loss
from agentrl.algorithms import register_column
from agentrl.config.registries import POLICY_LOSSES

def twice(trajectory, transcript):
    return 2.0

def loss(columns): ...

register_column("twice", per="sequence", make=twice, purpose="two")
POLICY_LOSSES.register("of_the_file")(loss)
"""
HELPER = """
from agentrl.config.registries import CALL_FORMATS

CALL_FORMATS.register("of_the_helper")(object())
"""
LOOP = """
from agentrl.agent_loop import AgentLoop

class Mine(AgentLoop):
    async def run(self, episode): ...
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "loss.py").write_text(LOSS)
    (tmp_path / "helper_of_the_loss.py").write_text(HELPER)
    (tmp_path / "loop.py").write_text(LOOP)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def known() -> tuple[bool, bool, bool]:
    return "twice" in COLUMNS, "of_the_file" in POLICY_LOSSES.names(), "of_the_helper" in CALL_FORMATS.names()


def test_what_a_file_registers_ends_with_the_run_and_comes_again_with_the_file(folder: Path) -> None:
    target = f"{folder}/loss.py:loss"
    for _ in range(3):
        with of_one_run():
            assert known() == (False, False, False)
            load_target(target, "key")
            assert known() == (True, True, True)
            assert is_users("twice")
            load_target(target, "key")
        assert known() == (False, False, False)
    load_target(target, "key")  # a config that is read before its run
    with of_one_run():
        assert known() == (True, True, True)
        with of_one_run():  # e.g. one of several jobs of a command
            load_target(target, "key")
        assert known() == (True, True, True)
    assert known() == (False, False, False)
    with of_one_run():
        load_target("helper_of_the_loss:CALL_FORMATS", "key")
        assert known() == (False, False, True)


def test_loops_of_a_yaml_file_end_with_the_run(folder: Path) -> None:
    file = folder / "loops.yaml"

    def load(name: str) -> None:
        file.write_text(yaml.safe_dump([{"name": name, "_target_": f"{folder}/loop.py:Mine"}]))
        load_agent_loops(file)

    before = agent_names()
    with of_one_run():
        load("first")
        assert "first" in agent_names()
    with of_one_run():
        load("second")
        assert set(agent_names()) - set(before) == {"second"}
        with naming(ConfigError, "'first'", "unknown"):
            AGENT_LOOPS.get("first")
    assert agent_names() == before


def test_what_a_script_registers_itself_stays() -> None:
    def mine(trajectory: object, transcript: object) -> float:
        return 1.0

    try:
        with of_one_run():
            register_column("of_the_script", per="sequence", make=mine, purpose="one")
        assert "of_the_script" in COLUMNS
    finally:
        COLUMNS.pop("of_the_script", None)
