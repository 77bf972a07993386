"""Client of a server that gives log-probs of given tokens: a teacher's, for the policy's own trajectories."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentrl.config.sections.distillation import TeacherConfig
from agentrl.errors import ConfigError
from agentrl.remote.client import RemoteClient, RemoteOptions
from agentrl.remote.credentials import Secrets, from_environment
from agentrl.remote.faults import FaultKind, RemoteUnavailable
from agentrl.remote.url import checked_url
from agentrl.system.deadline import within
from agentrl.system.json_value import JSON

ATTEMPTS = 4
BYTES_OF_AN_ENTRY = 192
"""Most bytes of a token's log-prob in an answer, with its text and its place among the likeliest."""
Pairs = list[tuple[int, float]]
"""Ids with their log-probs."""


@dataclass(frozen=True, slots=True)
class GivenTokens:
    """Log-probs of the last tokens of a sequence."""

    first: int
    """Place of the first of them in the sequence."""
    logprobs: list[float]
    top: list[Pairs]
    """The likeliest tokens in each one's place, as many as the request asks for; empty if it asks for 0."""


class LogprobServer:
    """One model of a server. Its key is removed from answers and errors."""

    def __init__(self, config: TeacherConfig, keys: str, *, top_k: int = 0) -> None:
        """keys: where `config` stands. top_k: likeliest tokens in each place. Raises ConfigError: URL, key, api."""
        assert config.base_url is not None
        self.url, self._config, self._top_k = config.base_url.rstrip("/"), config, top_k
        example = "http://HOST:30000" if config.api == "sglang" else "http://HOST:PORT/v1"
        try:
            checked_url(self.url, example)
        except ValueError as error:
            raise ConfigError(f"{keys}.base_url: {error}") from error
        if top_k and config.api == "echo":
            raise ConfigError(
                f"{keys}.api=echo names the likeliest tokens by their text, which may be several ids': take "
                "distillation.scope=sampled, or a server with prompt_logprobs or SGLang's /generate"
            )
        self._headers: dict[str, str] = {}
        options = RemoteOptions(attempt_timeout=config.timeout, attempts=ATTEMPTS)
        self._client = RemoteClient(f"the teacher at {self.url}", options)
        if config.api_key_env is not None:
            try:
                key = from_environment(config.api_key_env)
            except ConfigError as error:
                raise ConfigError(f"{keys}.api_key_env: {error}") from error
            self._headers, self._client.secrets = {"Authorization": f"Bearer {key}"}, Secrets([key])

    async def score(self, ids: Sequence[int], first: int) -> GivenTokens:
        """Ask for the log-probs of ids[first:], `first` at least 1.

        Raises RemoteUnavailable: no answer in time, or an answer about other tokens; RemoteRefused.
        """
        path, body = self._request(list(ids), first)
        entries = (1 + self._top_k) * len(ids)
        async with within(ATTEMPTS * self._config.timeout):
            with self._client.secrets.hidden_in_errors():
                answer = await self._client.request(
                    "POST",
                    f"{self.url}/{path}",
                    body=json.dumps(body).encode(),
                    headers=self._headers,
                    safe=True,
                    max_answer_bytes=(1 << 20) + BYTES_OF_AN_ENTRY * entries,
                )
        try:
            found = self._read(json.loads(answer.body), list(ids), first)
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            said = self._client.secrets.hide(answer.body.decode(errors="replace"))[:300]
            raise RemoteUnavailable(
                FaultKind.ANSWER,
                f"{self.url}/{path}: expected log-probs of {len(ids) - first} given tokens ({error}), found {said}",
            ) from None
        return found

    async def close(self) -> None:
        """Close the connections."""
        await self._client.close()

    def _request(self, ids: list[int], first: int) -> tuple[str, dict[str, JSON]]:
        """Return path and body; one token more is sampled where a server does not take 0."""
        if self._config.api == "sglang":
            return "generate", {
                "input_ids": list(ids),
                "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
                "return_logprob": True,
                "logprob_start_len": first - 1,
                "top_logprobs_num": self._top_k,
            }
        body: dict[str, JSON] = {"model": self._config.model, "prompt": list(ids), "temperature": 1.0}
        if self._config.api == "echo":
            return "completions", body | {"max_tokens": 0, "echo": True, "logprobs": 0}
        return "completions", body | {"max_tokens": 1, "prompt_logprobs": self._top_k}

    def _read(self, answer: JSON, ids: list[int], first: int) -> GivenTokens:
        """Read an answer. Raises LookupError, TypeError, ValueError or AttributeError for another form."""
        if not isinstance(answer, dict):
            raise TypeError("it is no object")
        match self._config.api:
            case "sglang":
                own, top = _of_sglang(answer, len(ids) - first, self._top_k)
            case "echo":
                own, top = _of_echo(answer, ids, first), []
            case _:
                own, top = _of_prompt(answer, ids[first:], self._top_k)
        if [token for token, _ in own] != ids[first:]:
            raise ValueError("it is about other tokens")
        if top and {len(pairs) for pairs in top} != {self._top_k}:
            raise ValueError(
                f"it has {sorted({len(pairs) for pairs in top})} likeliest tokens in place of {self._top_k}"
            )
        return GivenTokens(first, [float(logprob) for _, logprob in own], top)


def _of_sglang(answer: dict[str, Any], count: int, top_k: int) -> tuple[Pairs, list[Pairs]]:
    """Read SGLang's own answer: the given tokens, and the likeliest ones at their places."""
    info = answer["meta_info"]
    own = [(int(entry[1]), entry[0]) for entry in info["input_token_logprobs"][-count:]]
    places = info["input_top_logprobs"][-count:] if top_k else []
    return own, [[(int(entry[1]), float(entry[0])) for entry in entries] for entries in places]


def _of_echo(answer: dict[str, Any], ids: list[int], first: int) -> Pairs:
    """Read a completion that repeats its prompt."""
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    if len(logprobs) < len(ids):
        raise ValueError(f"it has {len(logprobs)} for {len(ids)} tokens")
    return list(zip(ids[first:], logprobs[first : len(ids)], strict=True))


def _of_prompt(answer: dict[str, Any], ids: list[int], top_k: int) -> tuple[Pairs, list[Pairs]]:
    """Read a completion with `prompt_logprobs`, as of vLLM."""
    tables = answer["choices"][0]["prompt_logprobs"][-len(ids) :]
    own = [(token, table[str(token)]["logprob"]) for token, table in zip(ids, tables, strict=True)]
    return own, [likeliest(table, top_k) for table in tables] if top_k else []


def likeliest(table: dict[str, dict[str, float]], count: int) -> Pairs:
    """Take the `count` likeliest of vLLM's {id: {logprob: ...}}, which holds the given token, too."""
    pairs = [(int(token), float(entry["logprob"])) for token, entry in table.items()]
    return sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count]
