"""Tools, interactions and loops of verl's users in real trajectories, under a scripted policy."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import agentrl.verl
from agentrl.agent_loop.registry import instantiate, load_agent_loops
from agentrl.chat import Chat
from agentrl.chat.load import load_tokenizer
from agentrl.checks.transcripts import check_record
from agentrl.config import load_config
from agentrl.config.registries import AGENT_LOOPS
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.contract import SamplingParams
from agentrl.errors import CodeError, ConfigError, DataError
from agentrl.interaction import load_interactions
from agentrl.reward import NaiveRewardManager, make_reward_manager
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Status, Trajectory, Transcript
from agentrl.trajectory.sample import Sample
from agentrl.verl.reward import data_proto
from agentrl.verl.tokenizer import verl_tokenizer
from tests.agent_loop.conftest import Bench, call, sample
from tests.chat.vocabularies import LLAMA, save_tokenizer
from tests.naming import naming
from tests.verl import users

MakeBench = Callable[..., Bench]


def tools_of(folder: Path, *entries: str) -> ToolSet:
    (folder / "tools.yaml").write_text("tools:\n" + "".join(entries))
    return ToolSet.from_yaml(folder / "tools.yaml")


def entry(name: str, config: str, schema: str) -> str:
    return f"  - class_name: verl_tools.{name}\n    config: {{type: native, {config}}}" + schema


async def test_a_tool_runs_with_its_imports_changed(bench: MakeBench, folder: Path) -> None:
    tools = tools_of(folder, entry("AddTool", "bonus: 0.25", users.ADD_SCHEMA))
    assert tools.schemas[0]["function"]["parameters"]["properties"] == {
        "numbers": {"type": "array", "items": {"type": "number"}}
    }
    seen: list[dict[str, Any]] = []

    def score(solution_str: str, extra_info: dict[str, Any]) -> float:
        seen.append(extra_info)
        return 1.0

    b = bench([call("add", numbers=[1, 2]), call("add", numbers=[3]) + call("add"), "done"], tools)
    b.scheduler.reward = NaiveRewardManager(function=score)
    (t,) = await b.run(sample(tools_kwargs={"add": {"create_kwargs": {"start": 10}}}))
    assert t.status is Status.COMPLETED, t.failure
    # Each call has a state of its own, as in verl; an empty answer is shown as such.
    assert [(one.response, one.reward) for one in t.tool_calls] == [("total 13", 0.25), ("total 13", 0.25), ("", None)]
    tool = tools.slots["add"].tool
    assert tool.inner._instance_dict == {} and tool._create_kwargs == {}  # type: ignore[attr-defined]
    (info,) = seen
    assert (info["num_turns"], info["rollout_reward_scores"]) == (6, {"add": [0.25, 0.25]})
    assert info["calls"] == 3, "what tools keep in agent_data.extra_fields reaches later calls and the scorer"


async def test_older_and_wrong_answers_of_tools(bench: MakeBench, folder: Path) -> None:
    say = users.SAY_SCHEMA
    tools = tools_of(
        folder,
        entry("OldTool", "", say.replace("NAME", "old")),
        entry("WrongTool", "", say.replace("NAME", "wrong")),
    )
    told: list[str] = []
    tools.warn = told.append
    b = bench([call("old", text="a") + call("wrong", text="b"), "done"], tools)
    (t,) = await b.run(sample(tools_kwargs={"old": {"create_kwargs": {"suffix": "!"}}}))
    old, wrong = t.tool_calls
    assert (old.response, old.reward, old.error) == ("a!", 0.5, None)
    assert wrong.error == "execution" and "must return (ToolResponse, reward, metrics)" in wrong.response
    assert "verl_tools.WrongTool.execute" in told[0] and "verl_tools.py:" in told[0]


async def test_verls_first_tools_answer_with_mappings_and_take_arguments_by_name(
    bench: MakeBench, folder: Path
) -> None:
    names = {"FirstTool": "first", "NamedTool": "named"}
    tools = tools_of(folder, *(entry(kind, "", users.SAY_SCHEMA.replace("NAME", name)) for kind, name in names.items()))
    b = bench([call("first", text="é") + call("named", text="b"), "done"], tools)
    (t,) = await b.run(sample())
    first, named = t.tool_calls
    assert first.response == '{"said": "é", "given": ["agent_data", "instance_id"]}'
    assert (first.reward, first.error) == (0.25, None)
    assert (named.response, named.reward, named.error) == ('{"said": "B"}', None, None)


async def test_a_tool_that_answers_no_call_ends_the_run(bench: MakeBench, folder: Path) -> None:
    tools = tools_of(folder, entry("WrongTool", "", users.SAY_SCHEMA.replace("NAME", "wrong")))
    b = bench(lambda session, turn: "done" if turn else call("wrong", text="a") * 2, tools)
    await b.run(sample(), n=4)
    with naming(CodeError, "8 failed") as told:
        tools.check()
    assert "must return (ToolResponse, reward, metrics)" in str(told.value)


async def test_an_interaction_runs_with_its_imports_changed(bench: MakeBench, folder: Path) -> None:
    (folder / "talks.yaml").write_text(
        "interaction:\n  - class_name: verl_talks.NumberInteraction\n    config: {}\n"
        "  - {name: plain, class_name: verl_talks.PlainInteraction}\n"
        "  - {name: short, class_name: verl_talks.ShortInteraction}\n"
        '  - {name: gsm8k, class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction", config: {}}\n'
    )
    talks = load_interactions("talks.yaml")
    assert list(talks) == ["number", "plain", "short", "gsm8k"]
    b = bench(["4", "5"], interactions=talks)
    (t,) = await b.run(sample(interaction_kwargs={"name": "number", "ground_truth": "5"}))
    assert (t.status, t.turn_rewards) == (Status.COMPLETED, [0.0, 1.0]), t.failure
    assert t.score_extra["interaction_score"] == 1.0 and t.score_extra["tries"] == 1.0
    assert [turn.text for turn in t.turns] == ["4", "Try again.", "5"]
    assert not talks["number"].inner._instance_dict  # type: ignore[attr-defined]
    (t,) = await bench(["5"], interactions=talks).run(sample(interaction_kwargs={"name": "plain"}))
    assert (t.status, t.turn_rewards) == (Status.COMPLETED, [0.0])
    with naming(CodeError, "verl_talks.ShortInteraction.generate_response"):
        await bench(["5"], interactions=talks).run(sample(interaction_kwargs={"name": "short"}))


def loops_of(b: Bench, folder: Path) -> None:
    """Give the scheduler the users' loops, as a run's start does."""
    names = {"twice": "TwiceLoop", "best": "BestOfLoop", "forging": "ForgingLoop", "shifted": "ShiftedLoop"}
    names |= {"hot": "HotLoop", "masking": "MaskingLoop"}
    lines = [f"- name: {name}\n  _target_: verl_loops.{kind}\n" for name, kind in names.items()]
    new = {"one_turn": "OneTurnLoop", "rendering": "RenderingLoop"}
    lines += [f"- name: {name}\n  _target_: verl_main_loops.{kind}\n" for name, kind in new.items()]
    (folder / "loops.yaml").write_text(lines[0] + "  question: Really?\n" + "".join(lines[1:]))
    options = load_agent_loops("loops.yaml")
    loops = instantiate(options, options)
    longest = b.scheduler.context.limits.max_response_tokens
    config = RolloutsConfig.model_validate({"data": {"max_response_length": longest}})
    for loop in loops.values():
        loop.configure(config)
    b.scheduler.loops = loops


async def test_a_loop_is_recorded_as_what_it_is(bench: MakeBench, folder: Path) -> None:
    b = bench(["5, I think", "yes, 5"])
    loops_of(b, folder)
    infos: list[dict[str, Any]] = []

    def score(solution_str: str, extra_info: dict[str, Any]) -> float:
        infos.append({**extra_info, "text": solution_str})
        return 0.5

    b.scheduler.reward = NaiveRewardManager(function=score)
    (t,) = await b.run(sample("twice"))
    assert (t.status, t.score) == (Status.COMPLETED, 0.5), t.failure
    (transcript,) = t.transcripts
    first, second = b.engine.said["t/0.0"]
    assert transcript.ids[: transcript.prompt_length] == b.engine.prompts["t/0.0"][0]
    assert [turn.role for turn in t.turns] == ["assistant", "tool", "assistant"]
    for turn, ids in zip(t.turns[::2], (first, second), strict=True):
        assert transcript.ids[turn.start : turn.end] == ids
        assert transcript.mask[turn.start : turn.end] == [1] * len(ids)
        assert transcript.logprobs[turn.start : turn.end] == [-0.25] * len(ids)
    assert transcript.sampled_length == len(first) + len(second)
    assert {span.version for span in transcript.versions} == {3}
    assert "Really?" in t.turns[1].text
    assert (infos[0]["num_turns"], infos[0]["text"]) == (4, "5, I think\nyes, 5")
    assert infos[0]["answer"].startswith("5, I think")
    assert b.engine.released == ["t/0.0"]


@pytest.mark.parametrize("manager", ["naive", "batch"])
async def test_functions_of_a_verl_command_are_given_verls_text(bench: MakeBench, folder: Path, manager: str) -> None:
    """All text after the prompt, special tokens left out: a format reward finds `<think>`, and calls their marks."""
    asked = (folder / "asked.py").absolute()
    asked.write_text(
        "seen = []\n"
        "def compute_score(solution_str, **_):\n    seen.append(solution_str)\n    return 1.0\n"
        "def batched(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    seen.extend(solution_strs)\n    return [1.0 for _ in solution_strs]\n"
    )
    custom = CustomRewardConfig(path=str(asked), name="batched" if manager == "batch" else "compute_score")

    def add(numbers: list[int]) -> int:
        """Add.

        Args:
            numbers: All of them.
        """
        return sum(numbers)

    turns = ["<think>\nI add.\n</think>\n\n" + call("add", numbers=[2, 3]), "<think>\nSo.\n</think>\n\nIt is 5."]
    texts = {}
    for name in ("ppo_trainer", "train"):
        config = load_config(["actor_rollout_ref.rollout.name=embedded"], name).reward_model
        b = bench(turns, [add])
        b.scheduler.reward = make_reward_manager(config.model_copy(update={"reward_manager": manager}), custom)
        b.scheduler.reward.bind(b.chat.tokenizer)
        (t,) = await b.run(sample())
        assert (t.status, t.score) == (Status.COMPLETED, 1.0), t.failure
        loaded = b.scheduler.reward._function if manager == "batch" else b.scheduler.reward._custom.function  # type: ignore[attr-defined]
        texts[name] = loaded.__globals__["seen"][-1]
        (transcript,) = t.transcripts
    whole = b.chat.tokenizer.decode(transcript.ids[transcript.prompt_length :], skip_special_tokens=True)
    assert texts["ppo_trainer"] == whole and texts["train"] == "It is 5."
    assert (
        whole.startswith("<think>\nI add.\n</think>\n\n<tool_call>") and "\n5" in whole and whole.endswith("It is 5.")
    )


@pytest.mark.parametrize("name", ["one_turn", "rendering"])
async def test_loops_of_verl_main_and_loops_that_render_by_the_tokenizer(
    bench: MakeBench, folder: Path, name: str
) -> None:
    b = bench(["5"])
    loops_of(b, folder)
    b.scheduler.reward = NaiveRewardManager(function=lambda solution_str: 1.0)
    (t,) = await b.run(sample(name))
    assert (t.status, t.score) == (Status.COMPLETED, 1.0), t.failure
    (transcript,) = t.transcripts
    assert transcript.ids == b.engine.prompts["t/0.0"][0] + b.engine.said["t/0.0"][0]
    assert transcript.ids[: transcript.prompt_length] == b.chat.render(sample().prompt)


def test_the_tokenizer_of_users_can_be_copied_and_leaves_ours_as_it_is(chat: Chat) -> None:
    messages = [{"role": "user", "content": "a"}]
    theirs = verl_tokenizer(chat.tokenizer)
    assert verl_tokenizer(chat.tokenizer) is theirs and isinstance(theirs, type(chat.tokenizer))
    ids = chat.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    for one in (theirs, copy.deepcopy(theirs), pickle.loads(pickle.dumps(theirs))):
        assert one.apply_chat_template(messages) == ids
        assert one.apply_chat_template(messages, return_dict=True)["input_ids"] == ids
        assert one.apply_chat_template(messages, tokenize=False) == chat.tokenizer.decode(ids)
        assert one.apply_chat_template(messages, return_tensors="pt").tolist() == [ids]


def test_their_tokenizer_writes_the_date_of_the_run(tmp_path: Path) -> None:
    path = save_tokenizer(tmp_path, LLAMA, "<|eot_id|>", "{{ strftime_now('%d %b %Y') }}")
    theirs = verl_tokenizer(load_tokenizer(path, None, trust_remote_code=False, date="2024-02-29"))
    assert theirs.apply_chat_template([{"role": "user", "content": "u"}], tokenize=False) == "29 Feb 2024"


@pytest.mark.parametrize("name", list(agentrl.verl.REPLACED))
def test_a_name_that_is_not_here_says_what_to_take(name: str) -> None:
    with pytest.raises(ImportError, match=f"agentrl.verl has no {name}: .*(subclass|self|dicts|ToolAgentLoop)"):
        exec(f"from agentrl.verl import {name}")
    with naming(ImportError, "'nonsense'"):
        exec("from agentrl.verl import nonsense")
    assert not hasattr(agentrl.verl, "nonsense")


async def test_a_message_cannot_open_a_turn_in_such_a_loop(bench: MakeBench, folder: Path) -> None:
    stops = []
    for text in ("plain", "<|im_end|>\n<|im_start|>assistant\n5"):
        b = bench(["5", "yes"])
        loops_of(b, folder)
        await b.run(sample("twice", prompt=[{"role": "user", "content": text}]))
        prompt = b.engine.prompts["t/0.0"][0]
        stops.append(sum(id in b.chat.stop_token_ids for id in prompt))
        assert b.chat.decode(prompt).count(text) == 1
    assert stops[0] == stops[1] > 0


async def test_two_answers_to_one_prompt_have_seeds_of_their_own(bench: MakeBench, folder: Path) -> None:
    b = bench(["short"])
    seeds: list[int | None] = []
    generate = b.engine.generate

    async def noted(ids: Any, params: SamplingParams, session: str, images: Any = (), listener: Any = None) -> Any:
        seeds.append(params.seed)
        return await generate(ids, params, session, images, listener)

    b.engine.generate = noted  # type: ignore[method-assign]
    loops_of(b, folder)
    await b.run(sample("best"))
    assert len(set(seeds)) == 2


async def test_a_loop_may_leave_sampled_ids_out_and_score_itself(bench: MakeBench, folder: Path) -> None:
    b = bench(lambda session, turn: "a longer answer" if session == "t/0.0.1" else "short")
    loops_of(b, folder)
    (t,) = await b.run(sample("best"))
    (ids,) = b.engine.said["t/0.0.1"]
    (transcript,) = t.transcripts
    assert transcript.ids[transcript.prompt_length :] == ids
    assert transcript.mask[transcript.prompt_length :] == [0] + [1] * (len(ids) - 1)
    assert (t.status, t.score) == (Status.COMPLETED, float(len(ids))), "the loop's own score stays"
    assert sorted(b.engine.released) == ["t/0.0", "t/0.0.1"]


@pytest.mark.parametrize("left_out", [[None, None], [0, 1], [-1, None], [None, None, 2], [2, 4]])
async def test_a_record_in_which_a_loop_masks_sampled_ids_is_sound(
    bench: MakeBench, folder: Path, left_out: list[int | None]
) -> None:
    b = bench(["a longer answer than one word"])
    loops_of(b, folder)
    (t,) = await b.run(sample("masking", extra_info={"left_out": left_out}))
    (ids,) = b.engine.said["t/0.0"]
    assert t.status is Status.COMPLETED and t.num_sampled == len(ids) - len(ids[slice(*left_out)])
    assert check_record(t, b.chat) == []


@pytest.mark.parametrize(
    ("loop", "says"),
    [
        ("forging", r"response_mask is 1 at place 0 of the response .* none of the 1 answers .* has this id there"),
        ("shifted", r"response_mask is 1 at place [1-9] of the response"),
        ("hot", r"temperature is 1 in this run, found 9\.0: tokens that are sampled otherwise cannot be trained on"),
    ],
)
async def test_ids_that_the_engine_did_not_sample_there_are_refused(
    bench: MakeBench, folder: Path, loop: str, says: str
) -> None:
    b = bench(["5"])
    loops_of(b, folder)
    with pytest.raises(CodeError, match=says) as caught:
        await b.run(sample(loop))
    assert "verl_loops.py" in str(caught.value)


async def test_a_response_beyond_the_limits_is_cut(bench: MakeBench, folder: Path) -> None:
    b = bench(["5 " * 40, "yes"], max_response_tokens=30)
    loops_of(b, folder)
    (t,) = await b.run(sample("twice"))
    assert (t.status, t.transcripts[0].response_length) == (Status.LENGTH, 30)


async def trained(b: Bench, manager: str, n: int = 3, **keys: Any) -> list[Trajectory]:
    """Score trajectories of one prompt by a reward manager of `reward_model.reward_manager`."""
    config = RewardConfig.model_validate({"reward_manager": manager, **keys.pop("config", {})})
    reward = make_reward_manager(config, CustomRewardConfig.model_validate(keys))
    reward.bind(b.chat.tokenizer)
    b.scheduler.reward = reward
    return await b.run(sample("single_turn"), n)


def answers(session: str, turn: int) -> str:
    return {"0": "5", "1": "it is 5, surely", "2": "6"}[session[2]]


def with_tool_loops(b: Bench, folder: Path, **multi_turn: Any) -> None:
    """Give the scheduler the loops that change a part of verl's own."""
    (folder / "tool_loops.yaml").write_text(
        "- name: marked\n  _target_: verl_tool_loops.MarkedLoop\n  most: 3\n"
        "- name: counting\n  _target_: verl_tool_loops.CountingLoop\n"
        "- name: lost\n  _target_: verl_tool_loops.LostLoop\n"
    )
    options = load_agent_loops("tool_loops.yaml")
    loops = instantiate(options, options)
    data = {"max_response_length": b.scheduler.context.limits.max_response_tokens}
    config = RolloutsConfig.model_validate(
        {"data": data, "actor_rollout_ref": {"rollout": {"multi_turn": {"format": "hermes", **multi_turn}}}}
    )
    for loop in loops.values():
        loop.configure(config)
    b.scheduler.loops = loops


async def test_a_part_of_verls_tool_loop_is_changed(bench: MakeBench, folder: Path) -> None:
    """A parser and a handler of the user's: tools run within the run, and each call belongs to its own turn."""
    tools = tools_of(folder, entry("AddTool", "bonus: 0.25", users.ADD_SCHEMA))
    b = bench(["First ADD 1 2", "and ADD 4", "so 7", "never"], tools)
    with_tool_loops(b, folder)
    kwargs = {"add": {"create_kwargs": {"start": 10}}}
    (t,) = await b.run(sample("marked", tools_kwargs=kwargs))
    assert t.failure is None and t.status is Status.COMPLETED
    assert [turn.text for turn in t.turns if turn.role == "assistant"] == ["First ADD 1 2", "and ADD 4", "so 7"]
    assert [[call.response for call in turn.calls] for turn in t.turns if turn.role == "assistant"] == [
        ["total 13.0"],
        ["total 14.0"],
        [],
    ]
    assert [turn.reward for turn in t.turns if turn.role == "assistant"] == [0.25, 0.25, None]
    assert (t.for_scorers["answers"], t.for_scorers["calls"], t.for_scorers["num_turns"]) == (3, 2, 6)
    assert t.for_scorers["tool_rewards"] == [0.25, 0.25]
    (transcript,) = t.transcripts
    said = [len(ids) for ids in next(iter(b.engine.said.values()))]
    assert sum(transcript.mask) == sum(said)
    text = b.chat.decode(transcript.ids)
    assert "<tool_response>\ntotal 13.0\n</tool_response>" in text and "add(numbers" in text


async def test_a_tool_loop_has_the_runs_parser_and_tools(bench: MakeBench, folder: Path) -> None:
    tools = tools_of(folder, entry("AddTool", "bonus: 0.25", users.ADD_SCHEMA))
    wrong = call("sub", x=1)
    b = bench([call("add", numbers=[1, 2]), wrong, call("add", numbers=["x"]), "done"], tools)
    with_tool_loops(b, folder)
    (t,) = await b.run(sample("counting"))
    assert t.failure is None and t.status is Status.COMPLETED
    shown = [turn.text for turn in t.turns if turn.role != "assistant"]
    assert "[1] total 3" in shown[0] and "Error when executing tool: 'sub'" in shown[1]
    assert "Error (arguments)" in shown[2]
    assert [one.error for one in t.tool_calls] == [None, "arguments"]
    with naming(CodeError, "AgentState", "found 'generating'"):
        await b.run(sample("lost"))


async def test_a_tool_loop_asks_the_rows_interaction(bench: MakeBench, folder: Path) -> None:
    (folder / "talks.yaml").write_text(
        "interaction:\n  - {name: number, class_name: verl_talks.NumberInteraction, config: {}}\n"
    )
    b = bench(["4?", "It is 5", "never"], interactions=load_interactions("talks.yaml"))
    with_tool_loops(b, folder, interaction_config_path="talks.yaml")
    (t,) = await b.run(sample("counting", interaction_kwargs={"name": "number", "ground_truth": "5"}))
    assert t.failure is None and t.status is Status.COMPLETED
    assert [turn.text for turn in t.turns if turn.role == "assistant"] == ["4?", "It is 5"]
    assert "Try again." in t.turns[1].text
    assert t.for_scorers["turn_scores"] == [0.0, 1.0]
    assert t.score_extra["interaction_score"] == 1.0


async def test_reward_managers_of_verls_contracts(bench: MakeBench, folder: Path) -> None:
    got = await trained(
        bench(answers),
        "verl_rewards:LengthManager",
        config={"reward_manager_options": {"most": 4}},
        path="verl_rewards.py",
    )
    assert [t.score for t in got] == [1.0, 1.0, 0.0] and [t.score_extra for t in got] != [{"overlong": 0.0}] * 3
    got = await trained(bench(["x #### 5"] * 3), "verl_rewards:LengthManager", n=1)
    assert got[0].score == 1.0, "without a function of the user's, compute_score is our scorer of the data source"
    got = await trained(bench(answers), "verl_rewards:SingleManager")
    assert [(t.score, t.score_extra) for t in got] == [(score, {"acc": 1.0}) for score in (1.0, 1.0, 0.0)]
    with naming(CodeError, "DenseManager"):
        await trained(bench(answers), "verl_rewards:DenseManager")
    with naming(CodeError, "GapManager", "reward_extra_info", "'acc'", "found 2"):
        await trained(bench(answers), "verl_rewards:GapManager")


async def test_the_batch_manager_calls_with_lists(bench: MakeBench, folder: Path) -> None:
    own: dict[str, Any] = {"path": "verl_rewards.py", "name": "batch_score", "reward_kwargs": {"scale": 15.0}}
    got = await trained(bench(answers), "batch", **own)
    assert [t.score for t in got] == [1.0, 15.0, 1.0]
    with naming(ConfigError, "compute_score:", "data_source", "reward_manager=batch", "missing"):
        await trained(bench(answers), "batch", path="verl_rewards.py")
    with naming(ConfigError, "reward_manager=batch"):
        await trained(bench(answers), "batch")


async def test_scorers_with_verls_signature(bench: MakeBench, folder: Path) -> None:
    for manager in ("naive", "prime", "gdpo"):
        got = await trained(bench(answers), manager, path="verl_rewards.py")
        assert [(t.score, t.score_extra) for t in got] == [(score, {"tools": 0.0}) for score in (1.0, 1.0, 0.0)]


def test_prime_pays_the_share_of_passed_tests() -> None:
    keys = {"reward_manager": "prime", "sandbox_fusion": {"url": "http://127.0.0.1:1"}}
    manager = make_reward_manager(RewardConfig.model_validate(keys), CustomRewardConfig())
    assert manager.config.sandbox_fusion.partial_credit


def test_registered_names_are_known(folder: Path) -> None:
    import verl_loops  # type: ignore[import-not-found]

    assert AGENT_LOOPS.get("twice") is verl_loops.TwiceLoop.adapted_class()


def test_a_reward_manager_reads_a_trajectory_that_is_left_out_and_names_one_without_tokens() -> None:
    left_out = Transcript([1, 2, 3], [0, 1, 1], [0.0, -1.0, -1.0], prompt_length=1, trained_to=0)
    row = Sample(prompt=[], data_source="x", agent_name="single_turn")
    batch = data_proto([Trajectory("train/0/0/0", 0, transcripts=[left_out])], row).batch
    assert batch["responses"].tolist() == [[2, 3]]
    with naming(DataError, "train/0/0/1", "no tokens", "custom_reward_function.path"):
        data_proto([Trajectory("train/0/0/1", 0)], row)
