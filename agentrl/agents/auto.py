"""The choice of an agent by the key that says which one it is."""

from __future__ import annotations

from agentrl.agents import command, function, harness_agent
from agentrl.agents.agent import Agent, AgentOptions
from agentrl.errors import ConfigError


def build_auto(options: AgentOptions) -> Agent:
    """Make the agent of `openai_proxy.harness`, `.target` or `.command`. Raises ConfigError."""
    if options.harness is not None:
        return harness_agent.build(options)
    if (options.target is None) == (options.command is None):
        raise ConfigError(
            "agent_name openai_proxy: set one of openai_proxy.harness, openai_proxy.target and openai_proxy.command, "
            "or openai_proxy.start=remote"
        )
    return command.build(options) if options.target is None else function.build(options)
