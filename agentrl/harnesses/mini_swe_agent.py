"""mini-swe-agent: a loop of about 100 lines with a shell, over Chat Completions."""

from __future__ import annotations

import json

from agentrl.agents.harness import Errand, Harness, HarnessOptions, Launch


class MiniSweAgentOptions(HarnessOptions):
    """Options of mini-swe-agent."""

    config: str = "mini.yaml"
    """Its own config: a name of one that it brings, or a file."""
    step_limit: int = 0
    """Turns after which it ends; 0: as many as the session allows."""


class MiniSweAgent(Harness):
    """mini-swe-agent. It runs each command of the policy as the trainer's user."""

    program = "mini"
    install = "pip install mini-swe-agent==2.4.6"
    version = "2.4.6"
    version_arguments = ("--help",)

    def __init__(self, options: MiniSweAgentOptions | None = None) -> None:
        self.options: MiniSweAgentOptions = options or MiniSweAgentOptions()
        self.without_mcp()

    def prepare(self, errand: Errand) -> Launch:
        settings: dict[str, str | int] = {
            "model.model_kwargs.api_base": errand.base_url,
            "model.model_kwargs.drop_params": True,
            "agent.step_limit": self.options.step_limit,
        }
        if errand.system:
            settings["agent.system_template"] = f"{{{{ {errand.system!a} }}}}"  # a text, no template
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
        arguments = ["-y", "--exit-immediately", "-l", "0", "-m", f"openai/{errand.model}"]
        arguments += ["-o", str(errand.home / "trajectory.json"), "-c", self.options.config, *words]
        arguments += ["-t", errand.instruction]
        environment = {
            "MSWEA_CONFIGURED": "true",
            "MSWEA_GLOBAL_CONFIG_DIR": str(errand.home / "mini-swe-agent"),
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_SILENT_STARTUP": "1",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",  # The endpoint refuses what it would refuse again.
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        }
        return Launch(arguments, environment)
