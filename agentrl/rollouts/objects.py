"""Objects that a Python script gives a run, where a command line names them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from agentrl.agent_loop import AgentLoop
from agentrl.agent_loop.registry import LoopFunction
from agentrl.interaction import Interaction
from agentrl.reward import RewardManager
from agentrl.tool import Tool


@dataclass(frozen=True, slots=True)
class UserObjects:
    """Loops, tools, interactions and a scorer, given in addition to the ones that the config names.

    Under Ray each rollout worker has copies of them (pickled by value where they are of a notebook or script).
    """

    loops: Mapping[str, AgentLoop | type[AgentLoop] | LoopFunction] = field(default_factory=dict)
    """By the name that rows (`agent_name`) and rollout.agent.default_agent_loop have for them."""
    tools: Sequence[Tool | Callable[..., object]] = ()
    interactions: Sequence[Interaction] = ()
    reward: Callable[..., object] | RewardManager | None = None
    """Scores every trajectory, in place of the scorers by data source; see docs/rewards.md. A manager is used as it is,
    in place of the one that the config names."""

    @property
    def keys(self) -> list[str]:
        """Keys of the config that name such parts, and that these objects stand in for."""
        rollout = "actor_rollout_ref.rollout"
        named: Sequence[tuple[str, object]] = (
            (f"{rollout}.agent.agent_loop_config_path", self.loops),
            (f"{rollout}.multi_turn.tool_config_path", self.tools),
            (f"{rollout}.multi_turn.interaction_config_path", self.interactions),
        )
        return [key for key, objects in named if objects]
