"""Random turns, cut into random tokens and heard in random pieces: a stream says what the whole answer says."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.chat import Chat
from tests.agent_loop.conftest import call
from tests.openai_api.conftest import ADD, scripted
from tests.openai_api.programs import FUNCTION, ChatProgram, MessagesProgram, Program, ResponsesProgram, events_of
from tests.openai_api.test_record import recorded, said

PARTS = [
    *(
        "word",
        " and",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "é",
        "\U0001f600",
        "\U0001f468\u200d\U0001f469\u200d\U0001f467",
        "一二",
        "e\u0301",
    ),
    *("ST", "STO", "STOP", "<", "<tool", "<tool_call", "</think", "<|", "{", "}", '{"name": "add"', "```"),
]
TOOLS: dict[type[Program], list[Any]] = {
    ChatProgram: [ADD],
    ResponsesProgram: [{"type": "function", "strict": False, **FUNCTION}],
    MessagesProgram: [{"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}],
}


class Splitting:
    """Tokenizer that cuts a text at random places, of which some are within a marker or half a character."""

    def __init__(self, chat: Chat, seed: int) -> None:
        self.whole, self.seed = chat.tokenizer, seed

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        rng, ids = random.Random(self.seed), list[int]()
        at = 0
        while at < len(text):
            end = at + rng.choice((1, 1, 2, 3, 5, 12, 40))
            ids += self.whole.encode(text[at:end], add_special_tokens=False)
            at = end
        return ids


def turn_of(rng: random.Random) -> str:
    """Reasoning (closed or not) or none, text, and calls (right, broken or cut) or none."""
    some = lambda most: "".join(rng.choices(PARTS, k=rng.randrange(most)))  # noqa: E731
    thought = rng.choice(
        ("", "", f"<think>\n{some(9)}\n</think>\n\n", f"<think>{some(9)}</think>", f"<think>\n{some(20)}")
    )
    calls = [
        call("add", a=rng.randrange(9), b="é\U0001f600"),
        call("other"),
        "<tool_call>\n{broken}\n</tool_call>",
        "<tool_call>\n{",
    ]
    return (
        thought + some(40) + "\n".join(rng.choices(calls, k=rng.choice((0, 0, 1, 2)))) + rng.choice(("", "", some(4)))
    )


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        hidden = ("id", "created_at", "signature", "created", "completed_at")
        return {name: without_ids(member) for name, member in value.items() if name not in hidden}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


def body_of(program: type[Program], seed: int) -> dict[str, Any]:
    """Ask in a manner of the seed."""
    rng = random.Random(-seed - 1)
    body = dict(program.least)
    if rng.random() < 0.7:
        body["tools"] = TOOLS[program]
    if rng.random() < 0.4 and program is not ResponsesProgram:
        body["stop_sequences" if program is MessagesProgram else "stop"] = ["STOP", "one", "\n\n\n"]
    most = rng.choice((600, 600, rng.randrange(1, 60)))
    return body | {"max_output_tokens" if program is ResponsesProgram else "max_tokens": most}


@pytest.mark.slice(2, "hostile")
@pytest.mark.parametrize("first", range(0, 400, 20))
@pytest.mark.parametrize("program", TOOLS)
async def test_a_stream_says_what_the_whole_answer_says(chat: Chat, program: type[Program], first: int) -> None:
    limits = {"max_model_len": 4096, "max_response_tokens": 3000}
    turn = ""
    async with scripted(chat, lambda session, number: turn, **limits) as (service, engine):
        for seed in range(first, first + 20):
            turn, body, answers = turn_of(random.Random(seed)), body_of(program, seed), list[Any]()
            engine.chat = SimpleNamespace(tokenizer=Splitting(chat, seed), stop_token_ids=chat.stop_token_ids)
            for stream in (False, True):
                options = {"stream_options": {"include_usage": True}} if stream and program is ChatProgram else {}
                engine.pieces, engine.most_between = random.Random(seed), 0.001 * stream
                engine.said.clear()
                async with service.session() as open:
                    url = program.url_of(open)
                    answer = await open.client._client.post(url, json={**body, **options, "stream": stream})
                    assert answer.status_code == 200, answer.text
                assert recorded(open.trajectory) == said(engine)
                found = program.put_together(events_of(answer.content)) if stream else program.whole(answer.json())
                answers.append(without_ids(found))
            assert answers[1] == answers[0], f"seed {seed}: {turn!r}, {body}"
