"""Each key that a loop reads can be set with that loop alone."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from agentrl.agent_loop import base
from agentrl.agent_loop.base import AgentLoop
from agentrl.agent_loop.registry import get_loop
from agentrl.config.checks import idle_keys
from agentrl.config.registries import AGENT_LOOPS
from agentrl.config.sections.rollout import MultiTurnConfig
from agentrl.config.sections.training import Config
from agentrl.environments.loop import EnvironmentLoop
from agentrl.openai_api import session
from agentrl.openai_api.agent_loop import OpenAIProxyLoop

KEYS = {
    "call_timeout": ["tool_timeout"],
    "truncation": ["max_tool_response_length", "tool_response_unit", "tool_response_truncate_side"],
    **{
        name: [name]
        for name in (
            *("force_final_answer", "max_assistant_turns", "max_malformed", "max_parallel_calls"),
            *("max_tokens_per_turn", "max_user_turns"),
        )
    },
}
"""By attribute of the limits or of the tools that a loop reads: keys of `multi_turn` that it comes from."""
VALUES = {"tool_response_unit": "characters", "tool_response_truncate_side": "left", "force_final_answer": False}
Keys = dict[str, object]
"""Values by dotted path in `actor_rollout_ref.rollout`."""
ALONE: dict[str, Keys] = {
    "environment": {"agent.agent_loop_config_path": "environments/openenv.yaml"},
    **{name: {"multi_turn.tool_config_path": "tools.yaml"} for name in ("react", "retool", "search_r1", "tool_agent")},
}
"""Keys without which no row can run the loop."""
INTERACTION: Keys = {"multi_turn.interaction_config_path": "interactions.yaml"}


def loops() -> dict[str, type[AgentLoop]]:
    return {**{name: get_loop(name) for name in AGENT_LOOPS.names()}, "environment": EnvironmentLoop}


def read_by(loop: type[AgentLoop]) -> set[str]:
    """Find the attributes of `KEYS` in the files of a loop and of what these import from its room."""
    modules = [module for one in loop.__mro__ if (module := inspect.getmodule(one)) and is_ours(module)]
    modules += [session] if loop is OpenAIProxyLoop else []  # which it imports late
    sources = [inspect.getsource(one) for one in {*modules, *(one for each in modules for one in imported(each))}]
    read = re.findall(r"\b(?:limits|tools)\.(\w+)", "\n".join(sources))
    if re.search(r"\bopen_tools\b|\brun_calls\b|\.call_tools\b|\bcall_tool\b|\btools\.shown\b", "\n".join(sources)):
        read += ["truncation", "max_parallel_calls", "call_timeout"]
    return set(read) & set(KEYS)


def imported(module: ModuleType) -> Iterator[ModuleType]:
    room = module.__name__.rpartition(".")[0]
    for value in vars(module).values():
        found = inspect.getmodule(value)
        if found is not None and is_ours(found) and found.__name__.rpartition(".")[0] == room:
            yield found


def is_ours(module: ModuleType) -> bool:
    return module.__name__.startswith("agentrl.") and module is not base


def idle(given: Keys) -> list[str]:
    sections: dict[str, dict[str, object]] = {"multi_turn": {}, "agent": {}}
    for path, value in given.items():
        section, _, key = path.partition(".")
        sections[section][key] = value
    config = Config.model_validate({"actor_rollout_ref": {"rollout": sections}})
    return sorted(idle_keys(config, {f"actor_rollout_ref.rollout.{path}" for path in given}))


@pytest.mark.parametrize("name", sorted(loops()))
def test_a_key_that_a_loop_reads_can_be_set_with_it_alone(name: str) -> None:
    read = read_by(loops()[name])
    assert read, "every loop has limits"
    if name in ("environment", "tool_agent"):
        assert read >= {"call_timeout", "truncation", "max_parallel_calls", "max_assistant_turns"}
    for attribute in sorted(read):
        for_interaction = attribute == "max_user_turns" or (attribute == "call_timeout" and name not in ALONE)
        alone = ALONE.get(name, {}) | (INTERACTION if for_interaction and name != "environment" else {})
        for key in KEYS[attribute]:
            assert idle({**alone, f"multi_turn.{key}": VALUES.get(key, 7)}) == [], (name, key)


def test_every_key_of_the_limits_is_among_them() -> None:
    known: set[str] = {key for keys in KEYS.values() for key in keys}
    others = {"compaction", "format", "interaction_config_path", "stop_conditions", "tool_config_path", "tool_options"}
    fields: dict[str, Any] = MultiTurnConfig.model_fields
    assert set(fields) - known == others
