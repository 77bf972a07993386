"""Pi, without a terminal: `pi -p`, over Chat Completions."""

from __future__ import annotations

import json

from agentrl.agents.harness import Errand, Harness, HarnessOptions, Launch

PROVIDER = "agentrl"


class PiOptions(HarnessOptions):
    """Options of Pi."""

    context_window: int = 128_000
    """Tokens from which it shortens its own context."""


class Pi(Harness):
    """Pi. It runs each command of the policy as the trainer's user."""

    program = "pi"
    install = "npm install -g @mariozechner/pi-coding-agent@0.73.1"
    version = "0.73.1"

    def __init__(self, options: PiOptions | None = None) -> None:
        self.options: PiOptions = options or PiOptions()
        self.without_mcp()

    def prepare(self, errand: Errand) -> Launch:
        folder = errand.home / ".pi" / "agent"
        folder.mkdir(parents=True)
        model = {
            "id": errand.model,
            "contextWindow": self.options.context_window,
            "maxTokens": self.options.context_window,
        }
        provider = {
            "baseUrl": errand.base_url,
            "api": "openai-completions",
            "apiKey": errand.api_key,
            "models": [model],
        }
        settings = json.dumps({"providers": {PROVIDER: provider}})
        (folder / "models.json").write_text(settings, encoding="utf-8")
        arguments = ["-p", "--no-session", "--provider", PROVIDER, "--model", errand.model]
        if errand.system:
            arguments += ["--append-system-prompt", errand.system]
        environment = {"PI_CODING_AGENT_DIR": str(folder), "PI_OFFLINE": "1", "PI_TELEMETRY": "0"}
        return Launch(arguments, environment, errand.instruction)
