"""Drift, caches, and what a turn costs."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest

from agentrl.chat import Chat, Drift
from agentrl.errors import ConfigError
from agentrl.trajectory import Message
from tests.chat.conversations import GO_ON, TOOLS, answers, assistant, conversation, sampled_turns


@pytest.mark.parametrize("name", ["hermes", "qwen3"])
def test_drift_kinds(make_chat: Callable[..., Chat], name: str) -> None:
    chat = make_chat(name)
    messages = conversation(assistant("The city of the weather."))
    prompt = chat.render(messages[:-1])
    stop = chat.stop_token_ids[0]
    head = [] if name == "hermes" else chat._codec.encode("<think>\n\n</think>\n\n")
    text = [*head, *chat.encode("The city of the weather.")]
    letters = [*head, *(id for letter in "The city of the weather." for id in chat.encode(letter))]
    assert letters != text
    assert chat.drift([*prompt, *text, stop], messages) is Drift.CLEAN
    assert chat.drift([*prompt, *text], messages) is Drift.CLEAN  # Cut, not drifted.
    assert chat.drift([*prompt, *letters, stop], messages) is Drift.REALIGN
    assert chat.drift([*prompt, *text[:-1], stop], messages) is Drift.FORK


def test_a_malformed_call_that_the_template_cannot_write_is_a_fork(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("coder")  # Its template asks for the items of the arguments.
    prompt = conversation()
    sampled = [*chat._codec.encode("<tool_call>oops</tool_call>"), chat.stop_token_ids[0]]
    message = chat.parse(sampled, TOOLS).to_message()
    assert chat.drift([*chat.render(prompt, TOOLS), *sampled], [*prompt, message], TOOLS) is Drift.FORK


def test_a_malformed_call_that_the_template_cannot_write_is_text_of_its_turn(make_chat: Callable[..., Chat]) -> None:
    """A conversation goes on with it in another transcript, e.g. from a summary."""
    chat = make_chat("coder")
    said = chat._codec.encode("Hm.\n<tool_call><function=calculator><|im_end|></tool_call>")
    message = chat.parse([*said, chat.stop_token_ids[0]], TOOLS).to_message()
    good = assistant("", 1)
    refused: Message = {"role": "tool", "content": "Error"}
    whole: list[Message] = [*conversation(), good, *answers(1), message, refused, GO_ON]
    text = chat.decode(ids := chat.render(whole, TOOLS))
    assert "Hm.\n<function=calculator><|im_end|>" in text and text.count("</tool_call>") == 2
    ends = chat._codec.added["<|im_end|>"]
    assert ids.count(ends) == chat.render(
        [*whole[:-3], {"role": "assistant", "content": "Hm."}, *whole[-2:]], TOOLS
    ).count(ends)
    with pytest.raises(ConfigError, match="items"):
        chat.format.render(chat.prepared(whole), TOOLS, True)


def test_first_prompt_is_remembered_by_content(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("hermes")
    messages: list[Message] = [{"role": "user", "content": "one"}]
    first = chat.render(messages, TOOLS)
    assert chat.render(copy.deepcopy(messages), copy.deepcopy(TOOLS)) == first
    first.append(0)  # The caller's copy.
    assert chat.render(messages, TOOLS) == first[:-1]
    messages[0]["content"] = "two"
    assert chat.decode(chat.render(messages, TOOLS)).count("two") == 1
    assert chat.render(messages) != chat.render(messages, TOOLS)


def test_the_oldest_prompts_are_forgotten_by_their_length(
    make_chat: Callable[..., Chat], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long conversations of agents, which never come back, took up to a gigabyte."""
    chat = make_chat("hermes")
    monkeypatch.setattr("agentrl.chat.chat.CACHED_CHARACTERS", 5000)
    for number in range(30):
        chat.render([{"role": "user", "content": f"{number} " * 200}])
        assert f'"{number} ' in next(reversed(chat._prompts))[0]
        assert sum(len(text) for text, _, _ in chat._prompts) <= 5000
    assert len(chat._prompts) > 5
    chat.render([{"role": "user", "content": "a" * 5000}])
    assert len(chat._prompts) > 5


def test_stop_tokens_and_vocabulary(make_chat: Callable[..., Chat]) -> None:
    chat = make_chat("qwen3")
    assert [chat.decode([id]) for id in chat.stop_token_ids] == ["<|im_end|>", "<|endoftext|>"]
    assert chat.vocab_size == len(chat.tokenizer) > max(chat._codec.added_ids)
    chat = make_chat("header_ends_turn")
    assert [chat.decode([id]) for id in chat.stop_token_ids] == ["<|user|>", "<|observation|>", "<|endoftext|>"]


def microseconds(work: Callable[[], object], repeats: int = 300) -> float:
    work()
    begun = time.perf_counter()
    for _ in range(repeats):
        work()
    return (time.perf_counter() - begun) / repeats * 1e6


@pytest.mark.parametrize("name", ["hermes", "qwen3", "glm-4.5", "llama"])
def test_cost_of_a_turn_is_printed(
    make_chat: Callable[..., Chat], name: str, record_property: Callable[[str, object], None]
) -> None:
    chat = make_chat(name)
    messages = conversation(assistant("", 1))
    ids, mask = chat.render_training(messages, TOOLS)
    turn = sampled_turns(ids, mask)[-1]
    long = chat.render([{"role": "user", "content": "word " * 32_000}]) + ids
    costs = {
        "first prompt, remembered": microseconds(lambda: chat.render(messages[:2], TOOLS)),
        "bridge": microseconds(lambda: chat.bridge(ids, answers(1), TOOLS)),
        "bridge after 32k tokens": microseconds(lambda: chat.bridge(long, answers(1), TOOLS)),
        "parse": microseconds(lambda: chat.parse(turn, TOOLS)),
    }
    print(f"\n{name}: " + ", ".join(f"{what} {cost:.0f} us" for what, cost in costs.items()))
    assert chat.bridge(long, answers(1), TOOLS) == chat.bridge(ids, answers(1), TOOLS)


def test_a_bridge_reads_no_further_back_than_the_last_turn(make_chat: Callable[..., Chat]) -> None:
    class Watched(list[int]):
        """Remembers the lowest index that was read."""

        lowest = 10**9

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            start = index.start if isinstance(index, slice) else index
            Watched.lowest = min(Watched.lowest, start + len(self) if start < 0 else start)
            return super().__getitem__(index)

        def __iter__(self):  # type: ignore[no-untyped-def]
            raise AssertionError("a bridge went over the whole transcript")

    for name in ("hermes", "qwen3", "glm-4.5", "llama-3", "minimax-m2", "kimi-k2"):
        chat = make_chat(name)
        prompt = chat.render([{"role": "user", "content": "word " * 1000}])
        for end in ([], [chat.stop_token_ids[0]]):
            Watched.lowest = 10**9
            transcript = Watched([*prompt, *chat.encode("cut"), *end])
            assert chat.bridge(transcript, [GO_ON])
            assert Watched.lowest >= len(prompt) - 20, name
