"""Client of a language model at an OpenAI-compatible endpoint, for interactions and scorers.

The one way by which text reaches another model than the policy's: `complete` breaks up control tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from agentrl.errors import ConfigError
from agentrl.remote.client import RemoteClient, RemoteOptions
from agentrl.remote.control_tokens import part_control_tokens
from agentrl.remote.credentials import Secrets, from_environment
from agentrl.remote.faults import FaultKind, RemoteRefused, RemoteUnavailable
from agentrl.remote.url import checked_url
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON
from agentrl.system.metrics import Metrics
from agentrl.system.threads import beside_loop
from agentrl.trajectory import Message
from agentrl.trajectory.picture import size_of, text_of

START_SECONDS = 30.0
"""Seconds in which an endpoint has to answer when a run begins."""


class ChatEndpoint:
    """One model of an endpoint; serves all trajectories. Its key is removed from answers and errors."""

    def __init__(
        self, name: str, keys: str, *, base_url: str, model: str, api_key_env: str | None, options: RemoteOptions
    ) -> None:
        """Check the URL. `name` says in messages who asks, `keys` where base_url and api_key_env stand in the config.

        Raises ConfigError.
        """
        self.url, self.model = base_url.rstrip("/"), model
        try:
            checked_url(self.url, "http://HOST:PORT/v1")
        except ValueError as error:
            raise ConfigError(f"{keys}.base_url: {error}") from error
        self._name, self._keys, self._key_env = name, keys, api_key_env
        self._headers: dict[str, str] = {}
        self._client = RemoteClient(name, options)

    async def start(self, run: str) -> None:
        """Ask for the endpoint's models, on behalf of `run`. Raises ConfigError: no key, no answer, other models."""
        self._client.run = run
        if self._key_env is not None:
            try:
                key = from_environment(self._key_env)
            except ConfigError as error:
                raise ConfigError(f"{self._name}: {self._keys}.api_key_env: {error}") from error
            self._headers, self._client.secrets = {"Authorization": f"Bearer {key}"}, Secrets([key])
        where = f"{self._name}: {self.url}"
        try:
            async with within(START_SECONDS):
                try:
                    listed = [model["id"] for model in (await self._ask("GET", "models"))["data"]]
                except RemoteRefused:  # some servers keep no such list
                    await self.complete([{"role": "user", "content": "Hello!"}])
                    return
        except (RemoteRefused, RemoteUnavailable) as error:
            raise ConfigError(f"{where}: no OpenAI-compatible endpoint (most end in /v1): {error}") from error
        except (LookupError, TypeError) as error:
            raise ConfigError(f"{where}/models: this is no list of models: {type(error).__name__}: {error}") from error
        if self.model not in listed:
            raise ConfigError(f"{where} has no model {self.model!r}; it has {', '.join(map(str, listed[:20]))}")

    async def complete(self, messages: Sequence[Message], **parameters: JSON) -> str:
        """Return the text of the model's answer, which may be empty; `parameters` are further fields of the request.

        Messages are sent as text. Instructions (role system) go as they are; in all others, which may quote a policy,
        no control token is left whole (`part_control_tokens`). Raises RemoteUnavailable and RemoteRefused.
        """
        sent = await beside_loop(size_of(messages), lambda: [_without_control_tokens(one) for one in messages])
        answer = await self._ask("POST", "chat/completions", model=self.model, messages=sent, **parameters)
        try:
            text = answer["choices"][0]["message"]["content"] or ""
        except (LookupError, TypeError) as error:
            raise RemoteUnavailable(FaultKind.ANSWER, f"{self.url}: no chat completion: {answer!r:.200}") from error
        if not isinstance(text, str):
            raise RemoteUnavailable(FaultKind.ANSWER, f"{self.url}: no text in its answer: {answer!r:.200}")
        return text

    def take_metrics(self) -> Metrics:
        """Return and reset the client's counts: see `RemoteClient.take_metrics`."""
        return self._client.take_metrics()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    async def _ask(self, method: str, path: str, **body: object) -> Any:
        """Make a request and return the JSON of its answer."""
        url = f"{self.url}/{path}"
        content = json.dumps(body, ensure_ascii=False).encode(errors="replace") if body else None
        with self._client.secrets.hidden_in_errors():
            answer = await self._client.request(method, url, body=content, headers=self._headers, safe=True)
        try:
            return json.loads(self._client.secrets.hide(answer.body.decode(errors="replace")))
        except ValueError as error:
            raise RemoteUnavailable(FaultKind.ANSWER, f"{url} answered no JSON: {error}") from None


def _without_control_tokens(message: Message) -> Message:
    text = text_of(message.get("content"))
    is_ours = message["role"] == "system"
    return {"role": message["role"], "content": text if is_ours else part_control_tokens(text)}
