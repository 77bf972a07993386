"""Rows at the start of a run: warnings about their loops, and the order of checks of template and rows."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.chat import Chat
from agentrl.config import load_config
from agentrl.data.contract import Dataset
from agentrl.errors import ConfigError
from agentrl.observe.open import open_display
from agentrl.rollouts.context import fit_prompts, load_context, open_rows
from agentrl.trainer.inputs import open_inputs
from tests.chat.templates import HERMES, IGNORES_TOOLS
from tests.chat.vocabularies import QWEN, save_tokenizer
from tests.naming import naming

PROMPT: dict[str, Any] = {
    "prompt": [{"role": "user", "content": "?"}],
    "data_source": "openai/gsm8k",
    "reward_model": {"ground_truth": "7"},
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(save_tokenizer(tmp_path_factory.mktemp("chat"), QWEN, "<|im_end|>", HERMES)))


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_without_a_loop_next_to_tools_are_counted_once(tmp_path: Path, chat: Chat, suffix: str) -> None:
    file = tmp_path / f"a.{suffix}"
    rows = [{**PROMPT, "agent_name": name} for name in (None, "tool_agent", None)]
    if suffix == "jsonl":
        file.write_text("".join(json.dumps({k: v for k, v in row.items() if v is not None}) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), file)
    words = [f"data.train_files={file}", "actor_rollout_ref.model.path=x"]
    words += ["actor_rollout_ref.rollout.multi_turn.tool_config_path=tools/calculator.yaml"]
    for loop, number in ((None, 1), ("tool_agent", 0)):
        default = [f"actor_rollout_ref.rollout.agent.default_agent_loop={loop}"] if loop else []
        config = load_config([*words, *default])
        context = load_context(config)
        data = open_rows(config, str(file), None, context)
        assert data.without_loop == 2
        warned: list[str] = []
        with open_display("test") as display:
            display.warn = warned.append  # type: ignore[method-assign, assignment]
            fit_prompts([data, data], config, chat, context, display)
        said = [text for text in warned if "have no agent_name" in text]
        assert len(said) == number
        for text in said:
            assert text.startswith(f"2 rows of {file} have no agent_name and run single_turn, which calls no tool")
            assert "actor_rollout_ref.rollout.agent.default_agent_loop" in text


@pytest.mark.parametrize("loop", ["tool_agent", "react", "single_turn"])
@pytest.mark.parametrize("tools", [True, False])
def test_rows_of_a_loop_for_tools_without_tools_are_remarked_once(
    tmp_path: Path, chat: Chat, loop: str, tools: bool
) -> None:
    rows = [{**PROMPT, "agent_name": name} for name in ("single_turn", loop, loop)]
    pq.write_table(pa.Table.from_pylist(rows), file := tmp_path / "a.parquet")
    path = "tools/calculator.yaml" if tools else "null"
    words = [f"data.train_files={file}", "actor_rollout_ref.model.path=x"]
    config = load_config([*words, f"actor_rollout_ref.rollout.multi_turn.tool_config_path={path}"])
    context = load_context(config)
    data = open_rows(config, str(file), None, context)
    warned: list[str] = []
    with open_display("test") as display:
        display.warn = warned.append  # type: ignore[method-assign, assignment]
        fit_prompts([data, data], config, chat, context, display)
    said = [text for text in warned if "which is for tools" in text]
    assert len(said) == (not tools and loop != "single_turn")
    for text in said:
        assert text.startswith(f"2 rows, the first is {file} row 1, run {loop}, ")
        assert "actor_rollout_ref.rollout.multi_turn.tool_config_path" in text


def test_a_template_that_cannot_be_used_is_refused_before_all_rows_are_rendered(
    tmp_path: Path, chat: Chat, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**PROMPT, "agent_name": "tool_agent"} for _ in range(3)]
    rows[0] = {**rows[0], "prompt": [{"role": "user", "content": "refuse me"}]}
    pq.write_table(pa.Table.from_pylist(rows), file := tmp_path / "a.parquet")
    words = [f"data.train_files={file}", "actor_rollout_ref.model.path=x", "data.on_bad_row=skip"]
    config = load_config([*words, "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools/calculator.yaml"])
    context = load_context(config)

    def opened(template: str) -> tuple[Dataset, Chat]:
        place = save_tokenizer(tmp_path / str(len(template)), QWEN, "<|im_end|>", template)
        return open_rows(config, str(file), None, context), Chat.from_pretrained(str(place))

    data, picky = opened("{% if messages[-1].content == 'refuse me' %}{{ raise_exception('no') }}{% endif %}" + HERMES)
    with open_display("test") as display:
        fit_prompts([data], config, picky, context, display)
        assert (len(data), data.bad.count) == (2, 1), "a fault of the first row is not the template's"
        data, blind = opened(IGNORES_TOOLS)
        monkeypatch.setattr(type(data), "filter_overlong", None)
        with naming(ConfigError, "tools", "no tool parser"):
            fit_prompts([data], config, blind, context, display)


@pytest.mark.parametrize("more", [[], ["data.max_response_length=2048"]])
def test_compaction_whose_summary_takes_the_whole_window_is_refused(
    tmp_path: Path, chat: Chat, more: list[str]
) -> None:
    """Every trajectory would end before its first turn."""
    pq.write_table(pa.Table.from_pylist([{**PROMPT, "agent_name": "tool_agent"}]), file := tmp_path / "a.parquet")
    words = [f"data.train_files={file}", "actor_rollout_ref.model.path=x", "data.train_batch_size=1", *more]
    words += ["actor_rollout_ref.rollout.multi_turn.tool_config_path=tools/calculator.yaml"]
    config = load_config([*words, "actor_rollout_ref.rollout.multi_turn.compaction.threshold=0.8"])
    context = load_context(config)
    data = open_rows(config, str(file), None, context)
    keys = ("compaction.max_summary_tokens=512", "data.max_response_length=512")
    with open_display("test") as display, nullcontext() if more else naming(ConfigError, *keys):
        fit_prompts([data], config, chat, context, display)


def test_what_a_loop_lacks_is_said_before_a_policy_is_made(tmp_path: Path) -> None:
    """The quickstart's policy takes minutes; loops that no row runs need nothing."""
    pq.write_table(pa.Table.from_pylist([PROMPT] * 32), file := tmp_path / "a.parquet")
    words = [f"data.train_files={file}", "actor_rollout_ref.model.path=quickstart"]
    words += ["actor_rollout_ref.rollout.agent.openai_proxy.target=no_such_agent.py:act"]
    default = "actor_rollout_ref.rollout.agent.default_agent_loop={}"
    config = load_config([*words, default.format("single_turn")])
    assert open_inputs(config).train.loops == ["single_turn"]
    with naming(ConfigError, "openai_proxy.target", "no_such_agent.py"):
        open_inputs(load_config([*words, default.format("openai_proxy")]))
