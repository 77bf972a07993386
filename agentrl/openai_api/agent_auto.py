"""The choice of an agent by the key that says which one it is."""

from __future__ import annotations

from agentrl.errors import ConfigError
from agentrl.openai_api import agent_command, agent_function, agent_harness
from agentrl.openai_api.agents import Agent, AgentOptions


def build_auto(options: AgentOptions) -> Agent:
    """Make the agent of `openai_proxy.harness`, `.target` or `.command`. Raises ConfigError."""
    if options.harness is not None:
        return agent_harness.build(options)
    if (options.target is None) == (options.command is None):
        raise ConfigError(
            "agent_name openai_proxy: set one of openai_proxy.harness, openai_proxy.target and openai_proxy.command, "
            "or openai_proxy.start=remote"
        )
    return agent_command.build(options) if options.target is None else agent_function.build(options)
