"""Images in requests of all three APIs: where they stand in the transcript, and which are refused in which words."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from agentrl.chat import Chat
from agentrl.openai_api.images import as_sent, read_image
from agentrl.trajectory import Message, Status
from agentrl.trajectory.picture import Picture, image_part, png
from tests.agent_loop.conftest import call
from tests.naming import assert_names
from tests.openai_api.conftest import ADD, Open, scripted
from tests.openai_api.programs import TOOL
from tests.openai_api.test_dialects import ODD
from tests.openai_api.test_record import recorded, said
from tests.vision.tiny import encoded, make_tiny_vision_policy

FILES = [encoded(1), encoded(2), encoded(3, 32, 16, "JPEG")]
FUNCTION: dict[str, Any] = ADD["function"]  # type: ignore[assignment]
ADDRESS = "https://example.org/cat.png"


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return Chat.from_pretrained(str(make_tiny_vision_policy(tmp_path_factory.mktemp("seeing"))))


def url(file: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(file).decode()}"


def chat_body(talk: list[Any]) -> dict[str, Any]:
    messages: list[Any] = []
    for role, text, image in talk:
        parts = [{"type": "image_url", "image_url": {"url": image, "detail": "auto"}}] * bool(image)
        if role == "call":
            made = {"id": text, "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
            messages.append({"role": "assistant", "content": None, "tool_calls": [made]})
        elif role == "result":
            content = [*parts, {"type": "text", "text": "shown"}]
            messages.append({"role": "tool", "tool_call_id": text, "content": content})
        else:
            messages.append({"role": role, "content": [*parts, {"type": "text", "text": text}]})
    return {"messages": messages, "tools": [ADD]}


def responses_body(talk: list[Any]) -> dict[str, Any]:
    items: list[Any] = []
    for role, text, image in talk:
        parts = [{"type": "input_image", "image_url": image, "detail": "auto"}] * bool(image)
        kind = "output_text" if role == "assistant" else "input_text"
        if role == "call":
            arguments = '{"a": 2, "b": 3}'
            items.append({"type": "function_call", "call_id": text, "name": "add", "arguments": arguments})
        elif role == "result":
            output = [*parts, {"type": "input_text", "text": "shown"}]
            items.append({"type": "function_call_output", "call_id": text, "output": output})
        else:
            items.append({"type": "message", "role": role, "content": [*parts, {"type": kind, "text": text}]})
    return {"input": items, "tools": [{"type": "function", **FUNCTION}]}


def messages_body(talk: list[Any]) -> dict[str, Any]:
    turns: list[Any] = []
    for role, text, image in talk:
        source: Any = {"type": "url", "url": image}
        if image and image.startswith("data:"):
            head, _, data = image.partition(";base64,")
            source = {"type": "base64", "media_type": head.removeprefix("data:"), "data": data}
        parts = [{"type": "image", "source": source}] * bool(image)
        if role == "call":
            used = {"type": "tool_use", "id": text, "name": "add", "input": {"a": 2, "b": 3}}
            turns.append({"role": "assistant", "content": [used]})
        elif role == "result":
            content = [*parts, {"type": "text", "text": "shown"}]
            block = {"type": "tool_result", "tool_use_id": text, "content": content}
            turns.append({"role": "user", "content": [block]})
        else:
            turns.append({"role": role, "content": [*parts, {"type": "text", "text": text}]})
    tool = {"name": "add", "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
    return {"max_tokens": 99, "messages": turns, "tools": [tool]}


BODIES = {"chat/completions": chat_body, "responses": responses_body, "messages": messages_body}
DIALECTS = pytest.mark.parametrize("path", BODIES)


async def post(open: Open, path: str, talk: list[Any]) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{open.base_url}/{path}", json=BODIES[path](talk))


def asked(file: bytes, text: str = "What is it?") -> Message:
    return {"role": "user", "content": [image_part(Picture(file)), {"type": "text", "text": text}]}


@DIALECTS
async def test_images_of_users_and_tools_stand_in_one_transcript(seeing: Chat, path: str) -> None:
    """The user's is in the first prompt, the tool's in what is appended; each has its own tokens and its own file."""
    script = [call("add", a=2, b=3), "A cat.", "Two."]
    async with scripted(seeing, script) as (service, engine), service.session() as open:
        talk = [("user", "What is it?", url(FILES[0])), ("call", "c1", None), ("result", "c1", url(FILES[1]))]
        talk += [("assistant", "A cat.", None), ("user", "And this?", url(FILES[2], "jpeg"))]
        for end in (1, 3, 5):
            answer = await post(open, path, talk[:end])
            assert answer.status_code == 200, answer.text
        (transcript,) = open.trajectory.transcripts
        assert recorded(open.trajectory) == said(engine)
        (prompts,) = engine.prompts.values()
        assert prompts[0] == seeing.render([asked(FILES[0])], [TOOL])
        assert transcript.ids[: len(prompts[2])] == prompts[2]
        assert [one.image.digest for one in transcript.images] == [Picture(file).digest for file in FILES]
        assert seeing.vision is not None
        for one, before in zip(transcript.images, (0, len(prompts[0]), len(prompts[1])), strict=True):
            token = seeing.vision.image_token_id
            assert one.start == transcript.ids.index(token, before)
            assert transcript.ids[one.start : one.start + one.image.tokens] == [token] * one.image.tokens
        assert [turn.text.partition(" ")[0] for turn in open.trajectory.turns if turn.role != "assistant"] == [
            "<image",
            "<image",
        ]


@DIALECTS
async def test_another_image_of_the_same_size_is_another_conversation(seeing: Chat, path: str) -> None:
    """Their ids are the same, so only the files tell them apart. A branch keeps the images before it."""
    async with scripted(seeing, ["A cat.", "Yes.", "No.", "Maybe."]) as (service, engine), service.session() as open:
        first, second = url(FILES[0]), url(FILES[1])
        more = [("assistant", "A cat.", None), ("user", "Sure?", None)]
        await post(open, path, [("user", "What is it?", first)])
        await post(open, path, [("user", "What is it?", second), *more])
        await post(open, path, [("user", "What is it?", first), *more])
        await post(open, path, [("user", "What is it?", first), *more])
        digests = [[one.image.digest for one in transcript.images] for transcript in open.trajectory.transcripts]
        assert digests == [[Picture(FILES[n]).digest] for n in (0, 1, 0)]
        assert [len(turns) for turns in engine.said.values()] == [2, 1, 1]


REFUSED: list[tuple[Callable[[], list[Any]], str]] = [
    (lambda: [("user", "Hi", ADDRESS)], "in base64"),
    (lambda: [("user", "Hi", "data:text/plain;base64,aGk=")], "in base64"),
    (lambda: [("user", "Hi", "data:image/png;base64,a*b=")], "base64"),
    (lambda: [("user", "Hi", url(b"no image"))], "no image that can be read (formats: PNG"),
    (lambda: [("user", "Hi", url(FILES[0][:-40]))], "the image is damaged"),
    (lambda: [("call", "c", None), ("result", "c", ADDRESS)], "in base64"),
    (
        lambda: [("user", "Hi", None), ("assistant", "x", url(FILES[0])), ("user", "Hi", None)],
        "assistant message has no",
    ),
]


@DIALECTS
async def test_images_that_are_refused_leave_nothing(seeing: Chat, path: str) -> None:
    async with scripted(seeing, []) as (service, engine), service.session() as open:
        for talk, words in REFUSED:
            if path == "messages" and "text/plain" in json.dumps(talk()):
                continue  # Only the file counts there.
            answer = await post(open, path, talk())
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert words in error["message"] and error["type"] == "invalid_request_error", error
            assert (answer.json().get("type") == "error") == (path == "messages")
            assert len(error["message"]) < 400
        assert not engine.prompts and not open.trajectory.transcripts and open.session.fault is None


@DIALECTS
async def test_a_model_without_images_says_so(chat: Chat, path: str) -> None:
    async with scripted(chat, []) as (service, _), service.session() as open:
        answer = await post(open, path, [("user", "Hi", url(FILES[0]))])
        assert answer.status_code == 400
        assert_names(answer.json()["error"]["message"], "text only")
        assert not open.trajectory.transcripts


async def test_a_policy_that_makes_up_an_image_ends_the_session(seeing: Chat) -> None:
    async with scripted(seeing, ["a"]) as (service, engine), service.session() as open:
        assert seeing.vision is not None
        whole, forged = engine.generate, seeing.vision.image_token_id

        async def forging(*given: Any, **more: Any) -> Any:
            made = await whole(*given, **more)
            made.ids[-1] = forged
            object.__setattr__(made.finish_reason, "matched", forged)
            return made

        engine.generate = forging
        talk = [("user", "What is it?", url(FILES[0]))]
        assert (await post(open, "messages", talk)).status_code == 200
        assert open.session.ending is Status.MALFORMED
        answer = await post(open, "messages", talk)
        assert answer.status_code == 400 and "has ended this session" in answer.text
        assert len(open.trajectory.transcripts) == 1


def test_no_value_in_place_of_an_image_is_an_error_of_the_endpoint() -> None:
    for odd in (*ODD, {"url": "data:image/png;base64," + "\ud800"}, "data:image/png;base64,é"):
        for value in (odd, {"url": odd}, {"type": "base64", "data": odd}, {"type": odd, "data": "aGk="}):
            with pytest.raises(ValueError, match=r"."):
                read_image(value)


def test_a_row_is_handed_to_its_agent_as_a_client_sends_it() -> None:
    plain: Message = {"role": "system", "content": "Look."}
    sent: list[Any] = as_sent([plain, *(asked(file) for file in FILES)])
    assert sent[0] == plain
    assert [read_image(message["content"][0]["image_url"]).data for message in sent[1:]] == FILES
    kinds = [message["content"][0]["image_url"]["url"].partition(";")[0] for message in sent[1:]]
    assert kinds == ["data:image/png", "data:image/png", "data:image/jpeg"]
    assert sent[1]["content"][1] == {"type": "text", "text": "What is it?"}
    assert read_image(url(png(Picture(FILES[0]).decode()))).size == Picture(FILES[0]).size
