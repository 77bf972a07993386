"""OpenCode, without a terminal: `opencode run`, over Chat Completions."""

from __future__ import annotations

import json

from agentrl.agents.harness import Errand, Harness, HarnessOptions, Launch

PROVIDER = "agentrl"


class OpenCodeOptions(HarnessOptions):
    """Options of OpenCode."""

    context_window: int = 128_000
    """Tokens from which it shortens its own context."""
    small_model: str = "policy-small"
    """Name under which it asks for titles."""


class OpenCode(Harness):
    """OpenCode. It runs each command of the policy as the trainer's user."""

    program = "opencode"
    install = "npm install -g opencode-ai@1.18.33"
    version = "1.18.33"

    def __init__(self, options: OpenCodeOptions | None = None) -> None:
        self.options: OpenCodeOptions = options or OpenCodeOptions()

    def prepare(self, errand: Errand) -> Launch:
        folder = errand.home / ".config" / "opencode"
        folder.mkdir(parents=True)
        limit = {"context": self.options.context_window, "output": self.options.context_window}
        models = {name: {"name": name, "limit": limit} for name in (errand.model, self.options.small_model)}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "name": PROVIDER,
            "options": {"baseURL": errand.base_url, "apiKey": errand.api_key},
            "models": models,
        }
        settings = {
            "provider": {PROVIDER: provider},
            "model": f"{PROVIDER}/{errand.model}",
            "small_model": f"{PROVIDER}/{self.options.small_model}",
            "share": "disabled",
            "autoupdate": False,
            "permission": {"*": "allow"},
            "mcp": {name: {"type": "remote", "url": url} for name, url in errand.mcp_servers.items()},
        }
        (folder / "opencode.json").write_text(json.dumps(settings), encoding="utf-8")
        if errand.system:
            (folder / "AGENTS.md").write_text(errand.system, encoding="utf-8")
        environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
        return Launch(["run", "--format", "json"], environment, errand.instruction)
