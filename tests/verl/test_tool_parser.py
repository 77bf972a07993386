"""A user's parser of tool calls as the run's format, in the loops of ours: only its import lines are changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrl.agent_loop.registry import load_agent_loops
from agentrl.chat import Chat
from agentrl.chat.check import start_up_check
from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status
from tests.agent_loop.conftest import Bench, sample
from tests.naming import naming
from tests.verl import users

FORMAT = "actor_rollout_ref.rollout.multi_turn.format"
LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"


@pytest.fixture(autouse=True)
def loops(folder: Path) -> None:
    (folder / "loops.yaml").write_text("- {name: marked, _target_: verl_tool_loops.MarkedLoop}\n")


@pytest.fixture
def chat(folder: Path, tiny_dir: Path) -> Chat:
    load_agent_loops("loops.yaml")  # the run's start loads the file, and with it the parser
    return Chat.from_pretrained(str(tiny_dir), format="marks")


async def test_the_format_is_a_parser_that_a_file_registers(
    bench: Callable[..., Bench], chat: Chat, folder: Path
) -> None:
    schema = users.ADD_SCHEMA
    (folder / "tools.yaml").write_text(f"tools:\n  - class_name: verl_tools.AddTool\n    config: {{}}{schema}")
    tools = ToolSet.from_yaml(folder / "tools.yaml")
    start_up_check(chat, [{"role": "user", "content": "?"}], tools.schemas)
    b = bench(["First ADD 1 2", "and ADD 4", "so 7"], tools)
    (t,) = await b.run(sample(tools_kwargs={"add": {"create_kwargs": {"start": 10}}}))
    assert (t.failure, t.status) == (None, Status.COMPLETED)
    assert [call.response for call in t.tool_calls] == ["total 13.0", "total 14.0"]
    assert [turn.text for turn in t.turns if turn.role == "assistant"][-1] == "so 7", "without the stop token"


def test_a_parser_may_be_named_by_its_file(folder: Path, tiny_dir: Path) -> None:
    parsed = Chat.from_pretrained(str(tiny_dir), format="verl_tool_loops.py:MarksParser")
    message = parsed.parse(parsed.encode("so ADD 1 2"))
    assert message.text == "so " and message.calls[0].name == "add"


def test_a_name_that_no_format_has_is_judged_where_files_may_register_it() -> None:
    assert load_config([f"{FORMAT}=marks2", f"{LOOPS}=loops.yaml"]).actor_rollout_ref.rollout.multi_turn.format
    with pytest.raises(ConfigError, match=r"multi_turn\.format='marks2' is unknown"):
        load_config([f"{FORMAT}=marks2"])


def test_a_name_that_nothing_registers_is_told_with_the_tokenizer(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"multi_turn\.format='marks2' is unknown"):
        Chat.from_pretrained(str(tiny_dir), format="marks2")


def test_a_name_of_ours_is_not_taken_silently(folder: Path) -> None:
    text = users.changed_imports(users.TOOL_LOOPS).replace('register("marks")', 'register("hermes")')
    (folder / "taken.py").write_text(text)
    (folder / "loops.yaml").write_text("- {name: taken, _target_: taken.CountingLoop}\n")
    with naming(ConfigError, "'hermes'"):
        load_agent_loops("loops.yaml")
