"""YAML that names verl's own classes, and the tool that stands for its checks of answers."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.agent_loop import ToolAgentLoop
from agentrl.agent_loop.registry import load_agent_loops
from agentrl.config.registries import AGENT_LOOPS
from agentrl.errors import ConfigError
from agentrl.interaction import load_interactions
from agentrl.system.plugin import import_object
from agentrl.tool import Tool
from agentrl.tool.shared import CallLimits
from agentrl.tool.toolset import ToolSet
from agentrl.verl.dialect import VERL_CLASSES
from interactions.gsm8k import Gsm8kInteraction
from tools.check_answer import CheckAnswerTool


def schema(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": parameters}}


def load(folder: Path, **entry: Any) -> ToolSet:
    (folder / "tools.yaml").write_text(yaml.safe_dump({"tools": [entry]}))
    return ToolSet.from_yaml(folder / "tools.yaml")


SANDBOX = {
    "sandbox_fusion_url": "http://localhost:8080/run_code",
    "num_workers": 128,
    "enable_global_rate_limit": True,
    "rate_limit": 10,
    "default_timeout": 30,
    "default_language": "python",
    "memory_limit_mb": 1024,
    "type": "native",
}
SEARCH = {
    "retrieval_service_url": "http://127.0.0.1:8000/retrieve",
    "num_workers": 120,
    "rate_limit": 120,
    "timeout": 30,
    "type": "native",
}


@pytest.mark.parametrize("name", [name for name in VERL_CLASSES if "SandboxFusionTool" in name])
def test_sandbox_fusion_is_the_code_interpreter(tmp_path: Path, name: str) -> None:
    tool = load(tmp_path, class_name=name, config=SANDBOX, tool_schema=schema("code_interpreter", code={})).slots
    slot = tool["code_interpreter"]
    assert slot.tool.options is not None
    options = slot.tool.options.model_dump()
    asked = {name: options[name] for name in ("url", "run_timeout", "language", "memory_limit_mb")}
    assert asked == {"url": "http://localhost:8080", "run_timeout": 30.0, "language": "python", "memory_limit_mb": 1024}
    assert slot.limits.max_concurrent == 10, "the smaller of both"


def test_the_search_tool_is_the_remote_search(tmp_path: Path) -> None:
    """verl's own file spells `items` as `item`, and no type of the list's members is known then."""
    queries = {"type": "array", "item": {"type": "string"}, "description": "Queries."}
    name = "verl.tools.search_tool.SearchTool"
    slots = load(tmp_path, class_name=name, config=SEARCH, tool_schema=schema("search", query_list=queries)).slots
    assert slots["search"].tool.options.url == "http://127.0.0.1:8000"  # type: ignore[union-attr]
    limits = CallLimits(type="native", timeout=30.0, max_concurrent=120, on_error="fail")
    assert slots["search"].limits == limits


def test_mcp_servers_are_read_from_verls_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mcp")
    from tools.mcp import tools as mcp_tools
    from tools.mcp.servers import HttpServer, read_servers_file

    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": {"a b": {"url": "http://x/mcp", "auth_token": "t"}}}))
    (server,) = read_servers_file(str(tmp_path / "mcp.json"), [], None)
    assert isinstance(server, HttpServer) and server.headers["Authorization"] == "Bearer t"
    seen: list[tuple[dict[str, Any], mcp_tools.MCPConfig]] = []

    def noted(self: mcp_tools.MCPTools) -> list[Tool]:
        assert isinstance(self.options, mcp_tools.MCPConfig)
        seen.append((self.config, self.options))
        return []

    monkeypatch.setattr(mcp_tools.MCPTools, "tools", noted)
    mcp = {"mcp_servers_config_path": str(tmp_path / "mcp.json"), "tool_selected_list": ["tavily_search_tool"]}
    config = {"rate_limit": 120, "timeout": 120, "type": "mcp"}
    load(tmp_path, class_name="verl.tools.mcp_search_tool.MCPSearchTool", config=config, mcp=mcp)
    ((given, options),) = seen
    assert (given["max_rate"], given["timeout"]) == (120, 120)
    assert (options.servers_file, options.tools) == (str(tmp_path / "mcp.json"), ["tavily_search_tool"])


async def test_the_check_of_answers(tmp_path: Path) -> None:
    for name, scorer in (
        ("verl.tools.gsm8k_tool.Gsm8kTool", "gsm8k"),
        ("recipe.partial_rollout.tools.gsm8k_tool.Gsm8kTool", "gsm8k"),
        ("verl.tools.geo3k_tool.Geo3kTool", "math"),
    ):
        shown = schema("calc_reward", answer={"type": "string"})
        tool = load(tmp_path, class_name=name, config={"type": "native"}, tool_schema=shown).slots["calc_reward"].tool
        assert isinstance(tool, CheckAnswerTool) and tool.options.scorer == scorer
    tool = CheckAnswerTool({}, None)
    await tool.create("a", ground_truth=72)
    answers = [await tool.execute("a", {"answer": text}) for text in ("71", "#### 72", "72")]
    assert [one.reward for one in answers] == [-0.05, 0.0, -0.05], "an answer that improves nothing costs"
    assert [one.text for one in answers] == ["71 is wrong.", "#### 72 is right.", "72 is right."]
    await tool.release("a")
    assert not tool._best


def test_interactions_and_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AGENT_LOOPS, "_registered", {})
    monkeypatch.chdir(tmp_path)
    Path("i.yaml").write_text("interaction:\n  - class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction\n")
    (interaction,) = load_interactions("i.yaml").values()
    assert isinstance(interaction, Gsm8kInteraction) and interaction.name == "gsm8k"
    theirs = "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop"
    spo = "recipe.spo.agent_loop.spo_tool_agent_loop.SPOToolAgentLoop"
    Path("l.yaml").write_text(f"- {{name: tool_agent, _target_: {theirs}}}\n- {{name: spo, _target_: {spo}}}\n")
    assert list(load_agent_loops("l.yaml")) == ["tool_agent", "spo"]
    assert AGENT_LOOPS.get("spo") is AGENT_LOOPS.get("tool_agent") is ToolAgentLoop


@pytest.mark.parametrize("name", [name for name, known in VERL_CLASSES.items() if not known.ours])
def test_what_nothing_stands_for_is_refused_with_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"tools\.yaml: tools\[0\] \({name}\): {name} .*agentrl\.verl"):
        load(tmp_path, class_name=name, config={})


def test_classes_of_ours_are_there() -> None:
    for known in VERL_CLASSES.values():
        if known.ours and known.ours != "tools.mcp.MCPTools":
            assert isinstance(import_object(known.ours), type)


def test_a_recipes_own_file_is_loaded_once_its_imports_are_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "recipe" / "spo"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    name, shown = "recipe.spo.spo_retool.CustomSandboxFusionTool", schema("code_interpreter", code={})
    caplog.set_level(logging.INFO)
    try:
        for imported, found in (("verl.tools.base_tool", "CodeInterpreterTool"), ("agentrl.verl", "AdaptedTool")):
            (folder / "spo_retool.py").write_text(
                f"from {imported} import BaseTool\nclass CustomSandboxFusionTool(BaseTool):\n    pass\n"
            )
            slots = load(tmp_path, class_name=name, config=SANDBOX, tool_schema=shown).slots
            assert found in [kind.__name__ for kind in type(slots["code_interpreter"].tool).__mro__]
    finally:
        for module in [one for one in sys.modules if one.partition(".")[0] == "recipe"]:
            del sys.modules[module]
    assert caplog.text.count("stands for") == 1
