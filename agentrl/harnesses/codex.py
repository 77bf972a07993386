"""Codex, without a terminal: `codex exec`, over OpenAI's Responses."""

from __future__ import annotations

import json
from typing import Literal

from agentrl.agents.harness import Errand, Harness, HarnessOptions, Launch


class CodexOptions(HarnessOptions):
    """Options of Codex."""

    sandbox: Literal["read-only", "workspace-write", "danger-full-access"] = "workspace-write"
    """Rights of the policy's commands in Codex's own sandbox, which needs Landlock or user namespaces."""


class Codex(Harness):
    """Codex. It asks nobody before it runs a command."""

    program = "codex"
    install = "npm install -g @openai/codex@0.171.0"
    version = "0.171.0"

    def __init__(self, options: CodexOptions | None = None) -> None:
        self.options: CodexOptions = options or CodexOptions()

    def prepare(self, errand: Errand) -> Launch:
        folder = errand.home / ".codex"
        folder.mkdir()
        lines = {
            "model": errand.model,
            "model_provider": "agentrl",
            "approval_policy": "never",
            "sandbox_mode": self.options.sandbox,
            "check_for_update_on_startup": False,
            "model_providers.agentrl.name": "agentrl",
            "model_providers.agentrl.base_url": errand.base_url,
            "model_providers.agentrl.env_key": "OPENAI_API_KEY",
            "model_providers.agentrl.wire_api": "responses",
            "analytics.enabled": False,
            **({"developer_instructions": errand.system} if errand.system else {}),
            **{f"mcp_servers.{json.dumps(name)}.url": url for name, url in errand.mcp_servers.items()},
        }
        # JSON's texts, true and numbers are TOML's, too, but for escapes of half a character and DEL.
        text = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in lines.items())
        text = text.replace("\x7f", "\\u007f")
        (folder / "config.toml").write_text(text, encoding="utf-8")
        arguments = ["exec", "--skip-git-repo-check", "--json", "-"]
        return Launch(arguments, {"CODEX_HOME": str(folder)}, errand.instruction)
