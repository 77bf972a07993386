"""verl's tool for programs, for files that subclass it; a YAML that names verl's own class has ours in its place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from agentrl.remote import FaultKind, RemoteClient, RemoteOptions, RemoteUnavailable, checked_url
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON
from agentrl.verl.calling import waited
from agentrl.verl.tools import BaseTool, OpenAIFunctionToolSchema, ToolResponse

FOR_THE_QUEUE = 60.0
"""Seconds that a request has in addition to its program's."""
NO_OUTPUT = "no stdout here"
"""Answer for a program that was stopped, in verl's words, which its users' policies know."""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "A tool that runs a program.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "The program."}},
            "required": ["code"],
        },
    },
}


class _Execute:
    """`execution_pool.execute`, whose `remote` runs a function in a thread."""

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)

    async def remote(self, function: Callable[..., object], *arguments: object, **named: object) -> object:
        """Run a function in a thread, with at most `num_workers` at once; return its result or raise its error."""
        async with self._places:
            return await asyncio.to_thread(function, *arguments, **named)


class ExecutionPool:
    """Threads that run programs' requests, as verl's tools ask them: `await pool.execute.remote(function, ...)`."""

    def __init__(self, most: int) -> None:
        self.execute = _Execute(most)


class SandboxFusionTool(BaseTool):
    """Tool that runs a program by a server of SandboxFusion's API, as `python -m sandbox.server` is.

    A subclass changes `execute` or `execute_code`. A server that gives no answer is a fault of the infrastructure.
    """

    def __init__(self, config: dict[str, JSON], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        """Raises ValueError where `sandbox_fusion_url` is no address."""
        super().__init__(config, tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA))
        options: dict[str, Any] = dict(config)
        self.num_workers = int(options.get("num_workers", 10))
        self.rate_limit = int(options.get("rate_limit", 10))
        self.default_timeout = float(options.get("default_timeout", 30))
        self.default_language = str(options.get("default_language", "python"))
        self.memory_limit_mb = int(options.get("memory_limit_mb", 1024))
        self.sandbox_fusion_url = str(options.get("sandbox_fusion_url", ""))
        checked_url(self.sandbox_fusion_url)
        self.execution_pool = ExecutionPool(min(self.num_workers, self.rate_limit))
        self._client = RemoteClient("the sandbox", RemoteOptions(attempt_timeout=self.default_timeout + FOR_THE_QUEUE))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> tuple[Any, Any, Any]:
        """Run the program of `code`, for `timeout` seconds in `language` where the call says so."""
        timeout = parameters.get("timeout", self.default_timeout)
        language = parameters.get("language", self.default_language)
        run = self.execution_pool.execute.remote
        result = await run(self.execute_code, instance_id, str(parameters.get("code", "")), timeout, language)
        return result if isinstance(result, ToolResponse) else str(result or ""), None, None

    def execute_code(self, instance_id: str, code: str, timeout: float = 30, language: str = "python") -> ToolResponse:
        """Run a program and wait for it: its output and errors. Raises RemoteUnavailable, RemoteRefused."""
        asked = {
            "code": code,
            "language": language,
            "run_timeout": timeout,
            "compile_timeout": timeout,
            "memory_limit_MB": self.memory_limit_mb,
        }
        run = waited(self._run(json.dumps(asked).encode(), float(timeout)))
        finished = run.get("status") == "Finished"
        return ToolResponse(text=f"{run.get('stdout') or ''}{run.get('stderr') or ''}" if finished else NO_OUTPUT)

    async def _run(self, body: bytes, seconds: float) -> dict[str, Any]:
        url = self.sandbox_fusion_url.rstrip("/").removesuffix("/run_code") + "/run_code"
        async with within(seconds + FOR_THE_QUEUE):
            answer = await self._client.request("POST", url, body=body, safe=True, runs=seconds)
        try:
            said = json.loads(answer.body)
            if said["status"] != "SandboxError":
                return dict(said["run_result"] or {})
            problem = str(said["message"])
        except (ValueError, LookupError, TypeError) as error:
            problem = f"answered {answer.body[:80]!r} ({type(error).__name__})"
        raise RemoteUnavailable(FaultKind.ANSWER, f"{url}: {problem}")
