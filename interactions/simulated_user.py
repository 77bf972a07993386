"""User played by a language model: it has a persona and a goal, and talks to the policy until the goal is reached."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic

from agentrl.interaction import Interaction, InteractionResponse
from agentrl.remote import FaultKind, RemoteOptions, RemoteUnavailable
from agentrl.remote.chat_endpoint import ChatEndpoint
from agentrl.remote.prompt_file import load_prompt
from agentrl.trajectory import Message
from agentrl.trajectory.picture import text_of

PROMPT = """\
You play a person who talks to an assistant. Stay that person: never speak of being a model, and never do the
assistant's part.
{% if persona %}
Who you are: {{ persona }}
{% endif %}
What you want: {{ goal }}

Rules:
- Write one message at a time, as short as people type, in your own words.
- Tell the assistant what it needs when it asks, not all at once. What is not written here you do not know.
- When you have got what you want, answer with {{ stop }} and nothing else.
- When it has become clear that you cannot get it, answer with {{ give_up }} and nothing else.
"""
GREETING = "Hello! What can I do for you?"
"""Words that the assistant seems to have said first: many chat templates want the other side to begin."""


class SimulatedUserOptions(RemoteOptions):
    """Config of the interaction."""

    base_url: str
    """URL of an OpenAI-compatible endpoint, with its `/v1`."""
    model: str
    api_key_env: str | None = None
    """Environment variable that holds the key; unset: none is sent."""
    attempt_timeout: float = pydantic.Field(30.0, gt=0)
    """Seconds after which one request is given up, and made again."""
    temperature: float = pydantic.Field(1.0, ge=0)
    max_tokens: int = pydantic.Field(256, gt=0)
    """Tokens of one user turn."""
    prompt: str | None = None
    """Jinja file with the user's instructions, of `persona`, `goal`, `stop` and `give_up`; unset: `PROMPT`."""
    stop: str = pydantic.Field("###STOP###", min_length=1)
    """Word by which the user says: I have what I want. It ends the dialogue."""
    give_up: str = pydantic.Field("###GIVE-UP###", min_length=1)
    """Word by which the user says: I shall not get it. It ends the dialogue, too."""


class SimulatedUserRow(pydantic.BaseModel):
    """A row's `interaction_kwargs`, beside `name`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    goal: str = pydantic.Field(min_length=1)
    persona: str = ""
    opening: str | None = None
    """First words of the user where the prompt has no user message; unset: the model's."""


@dataclass(slots=True)
class _User:
    """One trajectory's user."""

    row: SimulatedUserRow
    turns: int = 0


class SimulatedUser(Interaction):
    """Interaction whose user turns a language model writes. For that model the roles are flipped.

    The system prompt, tool calls and tool answers are not shown to it. There are no scores: whether the task was done
    is for a scorer or an environment to say. The number `goal_reached` is 1 when the user ended with `stop`.

    Row: `interaction_kwargs: {name: ..., goal: ..., persona: ..., opening: ...}`.
    """

    on_resume = "answers"
    config_model = SimulatedUserOptions
    row_model = SimulatedUserRow
    options: SimulatedUserOptions

    def __init__(self, config: dict[str, Any], name: str) -> None:
        """Check the endpoint's URL and read the prompt. Raises ConfigError for a URL or a template that cannot be
        used."""
        super().__init__(config, name)
        options = self.options
        self._endpoint = ChatEndpoint(
            f"interaction {name}",
            "config",
            base_url=options.base_url,
            model=options.model,
            api_key_env=options.api_key_env,
            options=options,
        )
        self._template = load_prompt(options.prompt, PROMPT, "config.prompt", ("persona", "goal", "stop", "give_up"))
        self._users: dict[str, _User] = {}

    async def start(self, run: str) -> None:
        """Ask the endpoint for its models. Raises ConfigError: no key, no answer, other models."""
        await self._endpoint.start(run)

    def take_metrics(self) -> Mapping[str, float]:
        return self._endpoint.take_metrics()

    async def close(self) -> None:
        await self._endpoint.close()

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Keep the row's persona and goal. Raises DataError for a row without a goal."""
        self.check_row(kwargs)
        self._users[instance_id] = _User(SimulatedUserRow.model_validate(kwargs))

    async def open_dialogue(self, instance_id: str, messages: list[Message]) -> str | None:
        """Return the row's `opening`, else the model's: the same request for all trajectories of a row."""
        row = self._users[instance_id].row
        if any(message["role"] == "user" for message in messages):
            return None
        return row.opening or await self._say(row, [], _seed(row.model_dump_json()))

    async def generate_response(self, instance_id: str, messages: list[Message]) -> InteractionResponse:
        user = self._users[instance_id]
        user.turns += 1
        text = await self._say(user.row, messages, _seed(f"{instance_id}/{user.turns}"))
        reached, given_up = self.options.stop in text, self.options.give_up in text
        extra = {"goal_reached": reached and not given_up}
        return InteractionResponse(should_end=reached or given_up, text=text, extra=extra)

    async def finalize_interaction(self, instance_id: str) -> None:
        del self._users[instance_id]

    async def _say(self, row: SimulatedUserRow, messages: Sequence[Message], seed: int) -> str:
        """Ask for the user's next message. Raises RemoteUnavailable and RemoteRefused."""
        options = self.options
        instructions = self._template.render(
            persona=row.persona, goal=row.goal, stop=options.stop, give_up=options.give_up
        )
        said = await self._endpoint.complete(
            [{"role": "system", "content": instructions}, *flipped(messages)],
            temperature=options.temperature,
            max_tokens=options.max_tokens,
            seed=seed,
        )
        text = said.rpartition("</think>")[2].strip()
        if not text:
            raise RemoteUnavailable(FaultKind.ANSWER, f"{self._endpoint.url}: the user said nothing: {said!r:.200}")
        return text


def flipped(messages: Sequence[Message]) -> list[Message]:
    """Exchange the roles of user and assistant, as the user's model sees the dialogue."""
    seen: list[Message] = [{"role": "user", "content": GREETING}]
    for message in messages:
        role = {"user": "assistant", "assistant": "user"}.get(message["role"])
        text = text_of(message.get("content"))
        if role is None or not text:
            continue
        if seen[-1]["role"] == role:
            seen[-1] = {"role": role, "content": f"{seen[-1]['content']}\n\n{text}"}
        else:
            seen.append({"role": role, "content": text})
    return seen


def _seed(text: str) -> int:
    """Hash a text to 31 bits, which every server takes."""
    return int.from_bytes(hashlib.blake2b(text.encode(errors="replace"), digest_size=4).digest(), "little") >> 1
