"""Agent loops: how the policy acts on one sample, and the scheduler that runs many at once."""

from agentrl.agent_loop.base import AgentLoop, Episode, LoopContext, Reply, StopCondition
from agentrl.agent_loop.inline import InlineLoop
from agentrl.agent_loop.limits import LoopLimits
from agentrl.agent_loop.observer import TurnObserver
from agentrl.agent_loop.react import ReactLoop
from agentrl.agent_loop.registry import agent_names, get_loop, load_agent_loops, register
from agentrl.agent_loop.scheduler import Request, Scheduler
from agentrl.agent_loop.single_turn import SingleTurnLoop
from agentrl.agent_loop.tagged import ReToolLoop, SearchR1Loop, Tag, TaggedLoop
from agentrl.agent_loop.tool_agent import ToolAgentLoop

__all__ = [
    "AgentLoop",
    "Episode",
    "InlineLoop",
    "LoopContext",
    "LoopLimits",
    "ReToolLoop",
    "ReactLoop",
    "Reply",
    "Request",
    "Scheduler",
    "SearchR1Loop",
    "SingleTurnLoop",
    "StopCondition",
    "Tag",
    "TaggedLoop",
    "ToolAgentLoop",
    "TurnObserver",
    "agent_names",
    "get_loop",
    "load_agent_loops",
    "register",
]
