"""verl's dialect: its keys (`keys/`), and the YAML files and classes that its commands and YAML files name.

A YAML file that says `dialect: verl` is written in verl's keys, and has verl's defaults. `dialect: verl-0.2` is the
dialect of verl's first releases: the same keys, with other meanings in their code.

A class of a recipe is the user's own if its file is there and its imports succeed; it is loaded as it is, with its
imports changed. Otherwise, as in a checkout of the recipes, our class replaces it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentrl.config.dialect import Dialect
from agentrl.system.entries import Entry
from agentrl.system.json_value import JSON
from agentrl.verl.keys.families import lent_defaults
from agentrl.verl.keys.translation import spelled, translate

logger = logging.getLogger(__name__)

MAINS = {
    "generation": "generate",
    "ppo_generation": "generate",
    "evaluation": "evaluate",
    "sft_trainer": "sft",
    "sft_trainer_engine": "sft",
}
"""YAML files of verl's other mains, and the module that does their work here."""
SANDBOX = {
    "sandbox_fusion_url": "url",
    "num_workers": "max_concurrent",
    "rate_limit": "max_concurrent",
    "default_timeout": "run_timeout",
    "default_language": "language",
    "enable_global_rate_limit": None,
}
RETRIEVER = {
    "retrieval_service_url": "url",
    "num_workers": "max_concurrent",
    "rate_limit": "max_concurrent",
    "enable_global_rate_limit": None,
}
MCP = {
    "mcp_servers_config_path": "servers_file",
    "tool_selected_list": "tools",
    "rate_limit": "max_rate",
    "num_workers": None,
    "enable_global_rate_limit": None,
}
OWN_CODE = (
    "is code of verl's that has no equal here. Bring its file, with its imports changed to agentrl.verl, and name the "
    "class where it then is"
)


@dataclass(frozen=True, slots=True)
class VerlClass:
    """A class of verl's, and its replacement."""

    ours: str = ""
    """Dotted name; empty where nothing of ours does the same."""
    keys: Mapping[str, str | None] = field(default_factory=dict)
    """Our name of each key of its config; None: it has no effect here. The others have the same names. Where two keys
    have one name, the smaller value holds."""
    config: Mapping[str, JSON] = field(default_factory=dict)
    """Further keys of our class."""
    why: str = OWN_CODE
    """Advice for a class without a replacement."""


_SANDBOX_TOOL = VerlClass("tools.code_interpreter.CodeInterpreterTool", SANDBOX)
_MCP_TOOLS = VerlClass("tools.mcp.MCPTools", MCP)
_GSM8K_TOOL = VerlClass("tools.check_answer.CheckAnswerTool", config={"scorer": "gsm8k"})
_TOOL_LOOP = VerlClass("agentrl.agent_loop.ToolAgentLoop")
_DAYTONA = VerlClass(
    why="runs programs in Daytona's cloud. Start a sandbox (python -m sandbox.server) and name "
    "tools.code_interpreter.CodeInterpreterTool with `config: {url: ...}`, or bring its file, with its imports changed "
    "to agentrl.verl"
)

VERL_CLASSES: dict[str, VerlClass] = {
    "verl.tools.gsm8k_tool.Gsm8kTool": _GSM8K_TOOL,
    "recipe.partial_rollout.tools.gsm8k_tool.Gsm8kTool": _GSM8K_TOOL,
    "verl.tools.geo3k_tool.Geo3kTool": VerlClass("tools.check_answer.CheckAnswerTool", config={"scorer": "math"}),
    "verl.tools.sandbox_fusion_tools.SandboxFusionTool": _SANDBOX_TOOL,
    "recipe.retool.retool.CustomSandboxFusionTool": _SANDBOX_TOOL,
    "recipe.spo.spo_retool.CustomSandboxFusionTool": _SANDBOX_TOOL,
    "recipe.retool.daytona_sandbox_tool.CustomDaytonaSandboxTool": _DAYTONA,
    "verl.tools.search_tool.SearchTool": VerlClass("tools.remote_search.RemoteSearchTool", RETRIEVER),
    "verl.tools.mcp_base_tool.MCPBaseTool": _MCP_TOOLS,
    "verl.tools.mcp_search_tool.MCPSearchTool": _MCP_TOOLS,
    "verl.tools.image_zoom_in_tool.ImageZoomInTool": VerlClass(),
    "verl.interactions.gsm8k_interaction.Gsm8kInteraction": VerlClass("interactions.gsm8k.Gsm8kInteraction"),
    "verl.interactions.weather_interaction.WeatherInteraction": VerlClass(),
    "recipe.collabllm.collabllm_interation.CollabLLMInteraction": VerlClass(),
    "verl.experimental.agent_loop.single_turn_agent_loop.SingleTurnAgentLoop": VerlClass(
        "agentrl.agent_loop.SingleTurnLoop"
    ),
    "verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop": _TOOL_LOOP,
    "recipe.spo.agent_loop.spo_tool_agent_loop.SPOToolAgentLoop": _TOOL_LOOP,
    "recipe.langgraph_agent.example.math_expression.MathExpressionReactAgentLoop": VerlClass(),
    "recipe.collabllm.collabllm_agent_loop.CollabLLMAgentLoop": VerlClass(),
}


def translated(entry: Entry) -> Entry:
    """Return an entry of tools, interactions or loops with our class and keys in place of verl's.

    Any other entry is returned as it is. Raises ConfigError for a class of verl's without a replacement.
    """
    key = "_target_" if "_target_" in entry.values else "class_name"
    name = entry.values.get(key)
    if not isinstance(name, str) or not name.startswith(("verl.", "recipe.")) or _is_users(name):
        return entry
    known = VERL_CLASSES.get(name, VerlClass())
    if not known.ours:
        raise entry.error(f"{name} {known.why}")
    values = {**entry.values, key: known.ours}
    if key == "class_name":
        config = dict(entry.mapping("config"))
        if known is _MCP_TOOLS:
            config |= entry.mapping("mcp")
            values.pop("mcp", None)
        values["config"] = _config(config, known)
    logger.info("%s: %s stands for %s", entry.where, known.ours, name)
    return replace(entry, values=values)


def _config(config: Mapping[str, object], known: VerlClass) -> dict[str, object]:
    """Write verl's keys of a class's config as ours."""
    ours: dict[str, object] = dict(known.config)
    for name, value in config.items():
        target = known.keys.get(name, name)
        if target is None:
            continue
        before = ours.get(target)
        if isinstance(before, int | float) and isinstance(value, int | float):
            value = min(before, value)
        ours[target] = value
    return ours


def _is_users(name: str) -> bool:
    """Check whether a class of a recipe is in a file that can be imported; verl's own classes never are a user's."""
    try:
        if name.startswith("recipe."):
            importlib.import_module(name.rpartition(".")[0])
    except ModuleNotFoundError:
        return False
    except Exception:
        return True  # its faults are reported where it is loaded
    return name.startswith("recipe.")


def advice(name: str) -> str:
    """Write which main does the work of one of verl's, and which of verl's choices there is."""
    if "@" in name:
        return ". Of verl's own choices model_engine is there (dp or megatron)"
    return f" (verl's {name} is python -m agentrl.{MAINS[name]} here)" if name in MAINS else ""


VERL = Dialect(translate, spelled, translated, advice, lent_defaults)
