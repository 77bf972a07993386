"""The endpoint of live clients, by OpenAI's own client over loopback: sessions, keys, feedback, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sqlite3
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic_core import from_json

from agentrl.agent_loop import LoopContext, LoopLimits
from agentrl.chat import Chat
from agentrl.engines.contract import SamplingParams
from agentrl.errors import TrainingError
from agentrl.observe.invariants import check_trajectory
from agentrl.rollouts.journal import trajectories_in
from agentrl.serve.endpoint import HEADER, LiveEndpoint
from agentrl.serve.loop import begin_episode
from agentrl.serve.options import LiveOptions
from agentrl.serve.rows import LiveRows
from agentrl.serve.store import Store
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status, Trajectory
from tests.agent_loop.conftest import LIMITS, chat, tiny_dir
from tests.agent_loop.scripted_engine import ScriptedEngine

__all__ = ["chat", "tiny_dir"]  # fixtures
CLIENT, OPERATOR = "the-key-of-clients", "the-key-of-the-operator"
Talk = list[Any]
SMALL = replace(LIMITS, max_assistant_turns=2), replace(LIMITS, max_response_tokens=90)
LONG = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "a b " * 1000}]}).encode()


@dataclass
class Live:
    """A server with its store, and both kinds of callers."""

    chat: Chat
    path: Path
    now: float = 1000.0
    limits: LoopLimits = LIMITS
    host: str = "127.0.0.1"
    engine: ScriptedEngine = field(init=False)
    store: Store = field(init=False)
    endpoint: LiveEndpoint = field(init=False)
    client: openai.AsyncOpenAI = field(init=False)
    http: httpx.AsyncClient = field(init=False)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Live]:
        """Serve until the end of the context; once more is a restart."""
        self.engine = ScriptedEngine(self.chat, lambda session, turn: f"Answer {turn} to {session.split('/')[1][:9]}")
        self.store = Store(self.path)
        context = LoopContext(self.engine, self.chat, ToolSet.from_tools([]), {}, self.limits)
        begin = partial(begin_episode, context, LiveRows([])[0], SamplingParams(1))
        options = LiveOptions(self.host, 0, client_key=CLIENT, operator_key=OPERATOR)
        self.endpoint = LiveEndpoint(options, self.store, self.chat, begin, lambda: None, lambda: self.now)
        await self.endpoint.start()
        url = f"{self.endpoint.url}/v1"
        async with (
            openai.AsyncOpenAI(base_url=url, api_key=CLIENT, max_retries=0) as self.client,
            httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {OPERATOR}"}) as self.http,
        ):
            try:
                yield self
            finally:
                await self.endpoint.close()
                self.store.close()

    async def say(self, talk: Talk, session: str | None = None, **more: Any) -> tuple[str, Talk]:
        """Ask: (id of the session, the conversation with the answer)."""
        headers = {} if session is None else {HEADER: session}
        create = self.client.chat.completions.with_raw_response.create
        answer = await create(model="policy", messages=talk, extra_headers=headers, **more)
        return answer.headers[HEADER], [
            *talk,
            {"role": "assistant", "content": answer.parse().choices[0].message.content},
        ]

    async def give(self, **body: Any) -> httpx.Response:
        return await self.http.post("/feedback", json=body)

    def recorded(self, id: str) -> Trajectory:
        """The session's trajectory, as the store has it."""
        stored = self.store.find(id)
        assert stored is not None and stored.record is not None
        (found,) = trajectories_in(stored.record)
        assert check_trajectory(found, self.chat.vocab_size) == []
        return found


@pytest.fixture
def live(chat: Chat, tmp_path: Path) -> Live:
    return Live(chat, tmp_path / "live.sqlite")


def user(text: str) -> Any:
    return {"role": "user", "content": text}


class TestSessions:
    async def test_a_call_without_a_name_is_joined_by_its_history(self, live: Live) -> None:
        async with live.serving():
            one, talk = await live.say([user("Hi")])
            other, _ = await live.say([user("Hi")])
            again, talk = await live.say([*talk, user("And?")])
            assert again == one != other
            third, _ = await live.say([*talk, user("Then?")])
            assert third == one
        async with live.serving():
            (transcript,) = live.recorded(one).transcripts
            assert len([turn for turn in live.recorded(one).turns if turn.role == "assistant"]) == 3
            assert sum(transcript.mask) == transcript.sampled_length

    async def test_a_body_is_parsed_once(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        bodies = []

        def counted(body: bytes, **more: Any) -> Any:
            bodies.append(body)
            return from_json(body, **more)

        monkeypatch.setattr("agentrl.openai_api.wire.from_json", counted)
        monkeypatch.setattr("agentrl.serve.endpoint.from_json", counted)
        async with live.serving():
            await live.say([user("Hi")])
        assert len(bodies) == 1

    async def test_a_name_is_a_header_or_metadata(self, live: Live) -> None:
        async with live.serving():
            one, _ = await live.say([user("Hi")], "chat-7")
            two, _ = await live.say([user("Something else")], metadata={"session_id": "chat-7"})
            assert one == two == "chat-7"
            assert len(live.recorded("chat-7").transcripts) == 2

    async def test_two_clients_with_one_history_are_told_apart(self, live: Live) -> None:
        live.chat.decode([0])
        async with live.serving():
            live.engine.script = lambda session, turn: "The same"
            first, talk = await live.say([user("Hi")])
            second, _ = await live.say([user("Hi")])
            found = {(await live.say([*talk, user("And?")]))[0] for _ in range(2)}
            assert found == {first, second}
            further, _ = await live.say([*talk, user("And?")])
            assert further not in found, "one that is asked again begins a session"

    async def test_two_who_ask_at_the_same_time_are_told_apart(self, live: Live) -> None:
        async with live.serving():
            live.engine.script = lambda session, turn: "The same"
            first, talk = await live.say([user("Hi")])
            second, _ = await live.say([user("Hi")])
            live.engine.together = 2
            live.engine.all_run.clear()
            found = await asyncio.gather(*(live.say([*talk, user(f"I am {name}")]) for name in "AB"))
            assert {id for id, _ in found} == {first, second}

    async def test_one_that_is_continued_by_its_name_is_continued_by_no_history(self, live: Live) -> None:
        async with live.serving():
            live.engine.script = lambda session, turn: "The same"
            unnamed, talk = await live.say([user("Hi")])
            await live.say([user("Hi")], "chat-7")
            await live.say([*talk, user("And?")], "chat-7")
            assert (await live.say([*talk, user("And?")]))[0] == unnamed

    async def test_a_refused_request_continues_nothing(self, live: Live) -> None:
        async with live.serving():
            id, talk = await live.say([user("Hi")])
            with pytest.raises(openai.BadRequestError):
                await live.say([*talk, user("word " * 5000)])
            said, live.engine.script = live.engine.script, lambda session, turn: RuntimeError("injected")
            with pytest.raises(openai.InternalServerError):
                await live.say([*talk, user("And?")])
            live.engine.script = said
            await live.say([user("A title for this?")], id)
            assert (await live.say([*talk, user("And?")]))[0] == id

    @pytest.mark.parametrize("name", ["chat-7", None])
    @pytest.mark.parametrize("limits", SMALL, ids=["turns", "tokens"])
    async def test_a_session_without_room_goes_on_in_the_next_part(
        self, live: Live, name: str | None, limits: LoopLimits
    ) -> None:
        live.limits = limits
        async with live.serving():
            talk: Talk = []
            ids = []
            for number in range(6):
                id, talk = await live.say([*talk, user(f"Question {number}")], name)
                ids.append(id)
            first = name or ids[0]
            assert set(ids) >= {first, f"{first}~2"} and ids == sorted(ids) and len(set(ids)) < 6
            await live.endpoint.rest(live.now)
            assert live.recorded(first).status is Status.COMPLETED, "it ends as its last answer left it"

    async def test_what_fits_in_no_session_is_refused_with_the_keys(self, live: Live) -> None:
        async with live.serving():
            _, talk = await live.say([user("Hi")], "chat-7")
            with pytest.raises(openai.BadRequestError, match=r"context length.*rollout\.max_model_len"):
                await live.say([*talk, user("a b " * 1000)], "chat-7")
            assert [one.id for one in live.store.sessions()] == ["chat-7"] == list(live.endpoint.open)

    @pytest.mark.parametrize("body", [b"no JSON", b'{"model": "policy", "messages": []}', LONG], ids=len)
    @pytest.mark.parametrize("header", [{}, {HEADER: "chat-7"}], ids=["unnamed", "named"])
    async def test_a_refused_request_begins_no_session(self, live: Live, body: bytes, header: dict[str, str]) -> None:
        async with live.serving():
            told = await live.http.post(
                "/chat/completions", content=body, headers={"authorization": f"Bearer {CLIENT}", **header}
            )
            assert told.status_code == 400
            assert not list(live.store.sessions()) and not live.endpoint.open

    async def test_a_store_that_cannot_be_written_holds_no_session(
        self, live: Live, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with live.serving():
            id, talk = await live.say([user("Hi")])

            def asked(*given: object) -> None:
                raise TrainingError("the disk is full")

            with monkeypatch.context() as patch, pytest.raises(openai.InternalServerError):
                patch.setattr(live.store, "asked", asked)
                await live.say([*talk, user("And?")])
            assert not live.endpoint.open[id].is_busy
            assert (await live.say([*talk, user("And?")]))[0] == id

    async def test_a_client_goes_on_after_a_restart(self, live: Live) -> None:
        async with live.serving():
            id, talk = await live.say([user("Hi")], tools=[ADD])
            before = live.recorded(id).transcripts[0]
        async with live.serving():
            again, talk = await live.say([*talk, user("And?")], tools=[ADD])
            assert again == id and not live.endpoint.open[id].is_lost
            (transcript,) = live.recorded(id).transcripts
            assert transcript.ids[: len(before)] == before.ids and len(transcript) > len(before)
            assert transcript.logprobs[: len(before)] == before.logprobs
            third, _ = await live.say([*talk, user("Then?")], id, tools=[ADD])
            assert third == id and len(live.recorded(id).transcripts) == 1
            assert len(live.engine.prompts[f"live/{id}.0"]) == 2, "the rest of it was sampled before"

    async def test_an_answer_that_was_stopped_is_written_down_and_goes_on(self, live: Live) -> None:
        async with live.serving():
            live.engine.script = lambda session, turn: "one two three four five six"
            live.engine.held_behind = "four"
            stream: Any = await live.client.chat.completions.create(model="policy", messages=[user("Hi")], stream=True)
            id, said = stream.response.headers[HEADER], ""
            async for piece in stream:
                said += piece.choices[0].delta.content or ""
                if "four" in said:
                    break
            await stream.close()
            while live.store.find(id).record is None:  # type: ignore[union-attr]
                await asyncio.sleep(0.01)
            assert live.recorded(id).turns[-1].text == said
            assert (await live.give(response=piece.id, value=0)).json() == {"session": id, "status": "taken"}
        async with live.serving():
            talk = [user("Hi"), {"role": "assistant", "content": said}, user("And?")]
            assert (await live.say(talk))[0] == id and len(live.recorded(id).transcripts) == 1

    @pytest.mark.parametrize("value", ['"\\ud83d"', "[" * 230 + "]" * 230], ids=["half a pair", "deep"])
    async def test_a_call_with_any_arguments_is_written_down_and_goes_on(self, live: Live, value: str) -> None:
        body = {"name": "add", "arguments": {"a": None}}
        text = f"<tool_call>\n{json.dumps(body).replace('null', value)}\n</tool_call>"
        async with live.serving():
            said, live.engine.script = live.engine.script, lambda session, turn: text
            create: Any = live.client.chat.completions.with_raw_response.create
            answer = await create(model="policy", messages=[user("Hi")], tools=[ADD])
            id, (call,) = answer.headers[HEADER], answer.parse().choices[0].message.tool_calls
        async with live.serving():
            live.engine.script = said
            function = {"name": "add", "arguments": call.function.arguments}
            calls = [{"id": call.id, "type": "function", "function": function}]
            talk = [user("Hi"), {"role": "assistant", "content": None, "tool_calls": calls}]
            talk += [{"role": "tool", "tool_call_id": call.id, "content": "seven"}]
            assert (await live.say(talk, tools=[ADD]))[0] == id
            assert live.recorded(id).turns[0].calls[0].answer.text == "seven", "it is known again"

    async def test_a_session_that_cannot_be_read_goes_on_in_the_next_part(self, live: Live) -> None:
        async with live.serving():
            _, talk = await live.say([user("Hi")], "chat-7")
            await live.give(session="chat-7", value=1)
        async with live.serving():
            live.store._link.execute("UPDATE tokens SET state = '{}'")
            for _ in range(2):
                assert (await live.say([*talk, user("And?")], "chat-7"))[0] == "chat-7~2"
            assert live.store.ready(live.now, ()) == [("chat-7", 3)]

    async def test_an_answer_that_nobody_took_before_a_kill_is_asked_for_again(
        self, live: Live, tmp_path: Path
    ) -> None:
        request = json.dumps({"model": "policy", "messages": [user("Hi")]}).encode()
        async with live.serving():
            port = int(live.endpoint.url.rpartition(":")[2])
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            head = f"authorization: Bearer {CLIENT}\r\n{HEADER}: chat-7\r\ncontent-length: {len(request)}"
            writer.write(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode() + request)
            while (found := live.store.find("chat-7")) is None or found.record is None:
                await asyncio.sleep(0.001)
            writer.transport.abort()
            with contextlib.closing(sqlite3.connect(tmp_path / "killed.sqlite")) as copy:
                live.store._link.backup(copy)
        killed = Live(live.chat, tmp_path / "killed.sqlite")
        async with killed.serving():
            assert len(killed.recorded("chat-7").turns) == 1
            _, talk = await killed.say([user("Hi")], "chat-7")
            await killed.endpoint.rest(killed.now)
            assert (await killed.say([*talk, user("And?")]))[0] == "chat-7"
            found_again = killed.recorded("chat-7")
            assert len(found_again.transcripts) == 1
            assert sum(turn.role == "assistant" for turn in found_again.turns) == 2

    async def test_a_silent_session_leaves_memory_and_comes_back(self, live: Live) -> None:
        async with live.serving():
            id, talk = await live.say([user("Hi")])
            live.now += 10
            await live.endpoint.rest(live.now - 20)
            assert id in live.endpoint.open
            await live.endpoint.rest(live.now - 5)
            assert not live.endpoint.open
            again, _ = await live.say([*talk, user("And?")])
            assert again == id and len(live.recorded(id).transcripts) == 1

    async def test_a_silent_session_is_continued_by_its_answer(self, live: Live) -> None:
        async with live.serving():
            create = live.client.responses.with_raw_response.create
            answer = await create(model="policy", input="Hi")
            await live.endpoint.rest(live.now)
            assert not live.endpoint.open
            again = await create(model="policy", input="And?", previous_response_id=answer.parse().id)
            assert again.headers[HEADER] == answer.headers[HEADER]

    async def test_the_longest_silent_session_makes_room(self, live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("agentrl.serve.endpoint.MOST_AT_ONCE", 2)
        async with live.serving():
            talks = {}
            for name in ("one", "two", "three"):
                live.now += 1
                _, talks[name] = await live.say([user("Hi")], name)
            assert set(live.endpoint.open) == {"two", "three"}
            assert (await live.say([*talks["one"], user("And?")]))[0] == "one"
            assert set(live.endpoint.open) == {"three", "one"}

    async def test_a_client_that_goes_on_after_the_training_begins_another_part(self, live: Live) -> None:
        async with live.serving():
            id, talk = await live.say([user("Hi")], "chat-7")
            await live.endpoint.rest(live.now)
            live.store.take(id, 3)
            part, talk = await live.say([*talk, user("And?")], "chat-7")
            assert part == "chat-7~2"
            assert (await live.say([*talk, user("Then?")], "chat-7"))[0] == part
            assert (await live.say([*talk, user("Then?")], part))[0] == part
            unnamed, talk = await live.say([user("Ho")])
            await live.endpoint.rest(live.now)
            live.store.take(unnamed, 4)
            assert (await live.say([*talk, user("And?")]))[0] not in (unnamed, part)

    async def test_the_other_apis_continue_too(self, live: Live) -> None:
        async with live.serving():
            create = live.client.responses.with_raw_response.create
            answer = await create(model="policy", input="Hi")
            id, response = answer.headers[HEADER], answer.parse()
            answer = await create(model="policy", input="And?", previous_response_id=response.id)
            assert answer.headers[HEADER] == id
            message = {"model": "policy", "max_tokens": 50, "messages": [user("Hi")]}
            told = await live.http.post("/messages", json=message, headers={"authorization": "", "x-api-key": CLIENT})
            assert told.status_code == 200 and told.headers[HEADER] not in ("", id)

    async def test_a_stream_is_written_down_before_its_end(self, live: Live) -> None:
        async with live.serving():
            stream: Any = await live.client.chat.completions.create(model="policy", messages=[user("Hi")], stream=True)
            id = stream.response.headers[HEADER]
            said = "".join([piece.choices[0].delta.content or "" async for piece in stream])
            assert said == f"Answer 0 to {id[:9]}"
            assert live.recorded(id).turns[-1].text == said

    async def test_an_engine_that_fails_costs_no_session(self, live: Live) -> None:
        async with live.serving():
            id, talk = await live.say([user("Hi")])
            said, live.engine.script = live.engine.script, lambda session, turn: RuntimeError("injected")
            with pytest.raises(openai.InternalServerError):
                await live.say([*talk, user("And?")])
            live.engine.script = said
            again, _ = await live.say([*talk, user("And?")], id)
            assert again == id and len(live.recorded(id).transcripts) == 1


class TestFeedback:
    async def test_it_is_given_by_session_or_by_answer(self, live: Live) -> None:
        async with live.serving():
            id, _ = await live.say([user("Hi")])
            assert (await live.give(session=id, value=1, id="k", comment="good")).json() == {
                "session": id,
                "status": "taken",
            }
            assert (await live.give(session=id, value=1, id="k")).json()["status"] == "already"
            answer = await live.client.chat.completions.create(model="policy", messages=[user("Hi")])
            told = (await live.give(response=answer.id, value=0.5)).json()
            assert told["status"] == "taken" and told["session"] != id
            assert live.store.find(told["session"]).score == 0.5  # type: ignore[union-attr]

    async def test_it_survives_a_restart(self, live: Live) -> None:
        async with live.serving():
            id, _ = await live.say([user("Hi")])
            await live.give(session=id, value=1)
        async with live.serving():
            assert live.store.ready(live.now, ()) == [(id, 3)]
            assert (await live.give(session=id, value=1)).json()["status"] == "already"

    @pytest.mark.parametrize(
        ("body", "status"),
        [
            ({"session": "nobody", "value": 1}, 404),
            ({"response": "chatcmpl-nothing", "value": 1}, 404),
            ({"value": 1}, 400),
            ({"session": "chat-7", "response": "x", "value": 1}, 400),
            ({"session": "chat-7"}, 400),
            ({"session": "chat-7", "value": "1"}, 400),
            ({"session": "chat-7", "value": True}, 400),
            ({"session": "chat-7", "value": 1e13}, 400),
            ({"session": "chat-7", "value": 1, "comment": "x" * 4001}, 400),
            ({"session": "chat-7", "value": 1, "id": ""}, 400),
            ({"session": "chat-7", "value": 1, "score": 1}, 400),
            ({"session": 7, "value": 1}, 400),
            ([1], 400),
        ],
    )
    async def test_bad_input_takes_nothing(self, live: Live, body: Any, status: int) -> None:
        async with live.serving():
            await live.say([user("Hi")], "chat-7")
            told = await live.http.post("/feedback", json=body)
            assert told.status_code == status, told.text
            assert live.store.find("chat-7").score is None  # type: ignore[union-attr]
            live.store.write_counts()
            assert live.store.totals()["feedback_unknown" if status == 404 else "feedback_refused"] == 1


class TestKeys:
    async def test_a_clients_key_gives_no_feedback(self, live: Live) -> None:
        async with live.serving():
            id, _ = await live.say([user("Hi")])
            for key, status in ((CLIENT, 403), ("another", 401), ("", 401)):
                told = await live.http.post(
                    "/feedback", json={"session": id, "value": 1}, headers={"authorization": f"Bearer {key}".strip()}
                )
                assert told.status_code == status
            assert live.store.find(id).score is None  # type: ignore[union-attr]
            live.store.write_counts()
            assert live.store.totals()["wrong_keys"] == 3

    @pytest.mark.parametrize("path", ["chat/completions", "responses", "messages", "messages/count_tokens"])
    async def test_nobody_asks_without_the_clients_key(self, live: Live, path: str) -> None:
        async with live.serving():
            told = await live.http.post(f"/{path}", json={"model": "policy", "messages": [user("Hi")]})
            assert told.status_code == 401
            assert (await live.http.get("/models")).status_code == 401
            assert not list(live.store.sessions())

    async def test_no_other_route_leads_to_a_session(self, live: Live) -> None:
        async with live.serving():
            id, _ = await live.say([user("Hi")], "chat-7")
            url = live.endpoint.url
            for path in (f"/{id}/v1/chat/completions", f"/{id}/v1/feedback", "/v1/sessions", "/v1/result"):
                assert (await live.http.post(f"{url}{path}", json={"score": 1.0})).status_code == 404

    @pytest.mark.parametrize("name", ["a b", "x" * 101, "a/b", "a~2", "~2"])
    async def test_a_name_of_another_form_begins_no_session(self, live: Live, name: str) -> None:
        async with live.serving():
            with pytest.raises((openai.BadRequestError, openai.NotFoundError)):
                await live.say([user("Hi")], name)
            assert not list(live.store.sessions())


async def test_it_listens_at_an_address_of_ipv6(live: Live) -> None:
    live.host = "::1"
    async with live.serving():
        assert live.endpoint.url.startswith("http://[::1]:")
        await live.say([user("Hi")])


async def test_prompts_are_counted_without_a_session(live: Live) -> None:
    async with live.serving():
        body = {"model": "policy", "messages": [user("Hi")]}
        told = await live.http.post("/messages/count_tokens", json=body, headers={"authorization": f"Bearer {CLIENT}"})
        assert told.json()["input_tokens"] > 0 and not list(live.store.sessions())


async def test_a_message_with_an_image_is_refused(live: Live) -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
    async with live.serving():
        with pytest.raises(openai.BadRequestError):
            await live.say([{"role": "user", "content": [picture]}])


ADD = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
