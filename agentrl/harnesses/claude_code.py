"""Claude Code, without a terminal: `claude -p`, over Anthropic's Messages."""

from __future__ import annotations

import json

from agentrl.agents.harness import Errand, Harness, HarnessOptions, Launch

QUIET = (
    *("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER", "DISABLE_ERROR_REPORTING"),
    *("DISABLE_TELEMETRY", "DISABLE_BUG_COMMAND", "DISABLE_COST_WARNINGS"),
)
"""Variables that keep it from asking other servers than the endpoint."""


class ClaudeCodeOptions(HarnessOptions):
    """Options of Claude Code."""

    max_turns: int | None = None
    """Turns after which it ends; None: as many as the session allows."""
    small_model: str = "policy-small"
    """Name under which it asks for titles, topics and summaries."""


class ClaudeCode(Harness):
    """Claude Code. It may run every tool without asking, as the trainer's user."""

    program = "claude"
    install = "npm install -g --allow-scripts=@anthropic-ai/claude-code @anthropic-ai/claude-code@2.1.197"
    version = "2.1.197"

    def __init__(self, options: ClaudeCodeOptions | None = None) -> None:
        self.options: ClaudeCodeOptions = options or ClaudeCodeOptions()

    def prepare(self, errand: Errand) -> Launch:
        arguments = ["-p", "--output-format", "json", "--dangerously-skip-permissions", "--model", errand.model]
        if errand.system:
            arguments += ["--append-system-prompt", errand.system]
        if self.options.max_turns is not None:
            arguments += ["--max-turns", str(self.options.max_turns)]
        if errand.mcp_servers:
            servers = {name: {"type": "http", "url": url} for name, url in errand.mcp_servers.items()}
            file = errand.home / "mcp.json"
            file.write_text(json.dumps({"mcpServers": servers}), encoding="utf-8")
            arguments += ["--mcp-config", str(file), "--strict-mcp-config"]
        environment = {
            **dict.fromkeys(QUIET, "1"),
            "ANTHROPIC_SMALL_FAST_MODEL": self.options.small_model,
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": self.options.small_model,
            "CLAUDE_CONFIG_DIR": str(errand.home / ".claude"),
            "IS_SANDBOX": "1",  # It refuses to skip permissions as root elsewhere.
        }
        return Launch(arguments, environment, errand.instruction)
