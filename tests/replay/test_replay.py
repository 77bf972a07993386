"""A recorded trajectory is sampled again token by token, by the command."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from agentrl.agent_loop.tool_calls import FINAL_ANSWER_REQUEST
from agentrl.config import Config
from agentrl.errors import DataError
from agentrl.replay.__main__ import main as replay
from agentrl.replay.again import Comparison, unscored
from agentrl.replay.edited import Edit, _messages, _replaced
from agentrl.replay.recorded import Stretch, _recorded
from agentrl.replay.report import line_of, print_turn
from agentrl.train import main
from agentrl.trajectory import ToolAnswer, ToolCallRecord, Trajectory, Turn
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from tests.config.hostile_run import Hostile, hostile_run
from tests.naming import assert_names, naming
from tests.runs import Overrides

__all__ = ["hostile_run"]  # a fixture


def with_turns(run: Path, step: int) -> Trajectory:
    """A trajectory of the step with a tool's answer in it, else its longest."""
    found = read_trajectories(run / "trajectories" / f"train_{step:06d}.parquet")
    return max(found, key=lambda one: (any(turn.role == "tool" for turn in one.turns), one.num_sampled))


@pytest.mark.slice(1, "matrix")
@pytest.mark.parametrize("more", [(), ("actor_rollout_ref.model.lora_rank=4",)])
def test_every_token_is_sampled_again(
    more: tuple[str, ...], small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    words = small_run("trainer.max_actor_ckpt_to_keep=null", "actor_rollout_ref.rollout.temperature=0.9", *more)
    assert main(words) == 0
    capsys.readouterr()
    for step in (1, 3):
        trajectory = with_turns(run, step)
        assert replay([str(run), "--trust", "--uid", trajectory.uid]) == 0
        said = capsys.readouterr().out
        turns = sum(turn.role == "assistant" for turn in trajectory.turns)
        assert said.count("all the same") == turns
        exact = sum(map(int, re.findall(r"(\d+) log-probs the same bit for bit", said)))
        assert max(map(float, re.findall(r"the others within (\S+)", said)), default=0) < 1e-5
        assert exact == trajectory.num_sampled or "the others within" in said
    for file in trajectory_files(run / "trajectories"):
        if file.name.startswith("val_000000"):
            uid = pq.read_table(file, columns=["uid"])["uid"][0].as_py()
            assert replay([str(run), "--trust", "--uid", uid]) == 0, "validation, sampled and greedy"
    later = with_turns(run, 3)
    capsys.readouterr()
    last = ["--checkpoint", str(run / "checkpoints" / "step_000003"), "--out", str(tmp_path / "other")]
    assert replay([str(run), "--trust", "--uid", later.uid, *last]) == 1
    found = re.search(r"turn (\d+) .*; the first other one is token (\d+)", capsys.readouterr().out)
    assert found is not None, "other weights sample other tokens"
    (other,) = read_trajectories(tmp_path / "other" / "trajectories" / "train_000003.parquet")
    turn, place = int(found[1]), int(found[2])
    assert len(other.turns) == turn + 1 and other.turns[-1].end == len(other.transcripts[0])
    assert other.transcripts[0].ids[:place] == later.transcripts[0].ids[:place]
    assert other.transcripts[0].ids[place : place + 1] != later.transcripts[0].ids[place : place + 1]


LOOP = '''
from agentrl.agent_loop import AgentLoop
from agentrl.trajectory import Status


class Branching(AgentLoop):
    """Two turns in one transcript, another transcript with the same prompt, and one of a branch."""

    async def run(self, episode):
        for _ in range(2):
            await episode.start(episode.sample.prompt)
            await episode.generate(max_tokens=3)
        await episode.observe([{"role": "user", "content": "and now?"}])
        branch = episode.branch()
        await branch.start(episode.sample.prompt)
        await branch.generate(max_tokens=4)
        await episode.generate(max_tokens=4)
        await episode.context.engine.release(branch.session)
        episode.finish(Status.COMPLETED)
'''


def test_transcripts_branches_and_several_versions_are_replayed(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of different weights, as asynchronous runs have them, are sampled each by its own."""
    (tmp_path / "branching.py").write_text(LOOP)
    (tmp_path / "loops.yaml").write_text("- {name: branching, _target_: branching.Branching}\n")
    monkeypatch.syspath_prepend(tmp_path)
    agent = "actor_rollout_ref.rollout.agent"
    more = [f"{agent}.agent_loop_config_path={tmp_path}/loops.yaml", f"{agent}.default_agent_loop=branching"]
    more += ["actor_rollout_ref.rollout.multi_turn.tool_config_path=null", "data.max_response_length=64"]
    more += ["data.val_files=null", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=null"]
    rows = [{"prompt": [{"role": "user", "content": f"What is {n} + 2?"}], "data_source": "x"} for n in range(16)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert main(small_run(f"data.train_files={tmp_path}/rows.parquet", "trainer.total_training_steps=2", *more)) == 0
    run = tmp_path / "run"
    paths = [run / "trajectories" / f"train_{step:06d}.parquet" for step in (1, 2)]
    tables = [pq.read_table(path) for path in paths]
    one, other = (table.slice(0, 1).to_pylist(maps_as_pydicts="strict")[0] for table in tables)
    assert (len(one["ids"]), len(one["turns"])) == (3, 5)
    assert replay([str(run), "--trust", "--uid", one["uid"]]) == 0
    assert capsys.readouterr().out.count("all the same") == 4
    # One trajectory of both: its first transcripts are of version 0, the last one of version 1.
    for name in ("ids", "mask", "logprobs", "versions", "prompt_length", "images", "policy"):
        one[name][2] = other[name][2]
    place = next(number for number, turn in enumerate(one["turns"]) if turn["transcript"] == 2)
    one["turns"][place] = other["turns"][place]
    pq.write_table(pa.Table.from_pylist([one], schema=tables[0].schema), paths[0])
    capsys.readouterr()
    assert replay([str(run), "--trust", "--uid", one["uid"]]) == 0
    said = capsys.readouterr().out
    assert said.count("all the same") == 4 and said.count("(version 1)") == 1 and "step_000001" in said
    for turn in one["turns"]:
        turn["seed"] = None
    pq.write_table(pa.Table.from_pylist([one], schema=tables[0].schema), paths[0])
    assert replay([str(run), "--trust", "--uid", one["uid"]]) == 2
    assert_names(" ".join(capsys.readouterr().err.split()), "turn 0")


def test_what_cannot_be_replayed_is_told(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert main(small_run("data.val_files=null", "trainer.save_freq=-1")) == 0
    uid = with_turns(run, 2).uid
    for arguments, told in (
        (["--uid", uid], r"want the weights of version 1, .* found step_000003 \(version 3\)"),
        (["--uid", "train/9/9/9"], "none of 3 files holds the trajectory"),
        (["--uid", with_turns(run, 1).uid, "--turn", "0", "--message", "x"], "--turn 0: want the number of a turn"),
        (["--uid", with_turns(run, 1).uid, "--turn", "1", "--tool-answer", "/none"], "cannot be read"),
    ):
        assert replay([str(run), "--trust", *arguments]) == 2
        assert re.search(told, " ".join(capsys.readouterr().err.split())), told
    assert replay([str(tmp_path), "--uid", uid]) == 2
    for words in (["--turn", "1"], ["--call", "0"], ["--message", "x"]):
        with pytest.raises(SystemExit):
            replay([str(run), "--uid", uid, *words])


def test_another_tool_answer_is_gone_on_from(
    small_run: Overrides, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The trajectory's own first turn is followed by an answer that it did not have; with its own, nothing changes."""
    run = tmp_path / "run"
    more = ["data.max_response_length=96", "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8"]
    assert main(small_run("data.val_files=null", "trainer.total_training_steps=1", "trainer.save_freq=-1", *more)) == 0
    path = run / "trajectories" / "train_000001.parquet"
    table = pq.read_table(path)
    trajectory = read_trajectories(path)[0]
    last = trajectory.turns[-1]
    # A tool's answer behind what the policy said: tiny policies seldom call one.
    row = table.slice(0, 1).to_pylist(maps_as_pydicts="strict")[0]
    row["turns"].append({**row["turns"][-1], "role": "tool", "text": "7", "start": last.end, "end": last.end})
    pq.write_table(pa.Table.from_pylist([row], schema=table.schema), path)
    (tmp_path / "answer.txt").write_text("the answer is forty-two")
    at = len(trajectory.turns)
    edited = ["--trust", "--uid", trajectory.uid, "--turn", str(at), "--tool-answer", str(tmp_path / "answer.txt")]
    # A run that records a cassette may go on meanwhile: nothing is written on it.
    values = yaml.safe_load((run / "config.yaml").read_text())
    values["tools"] = {**values.get("tools", {}), "cassette": "record", "cassette_path": str(tmp_path / "cassette")}
    (run / "config.yaml").write_text(yaml.safe_dump(values, explicit_end=True))
    assert replay([str(run), *edited, "--out", str(tmp_path / "one")]) == 0
    assert not (tmp_path / "cassette").exists()
    said = capsys.readouterr().out
    assert_names(said, "--- tool\nthe answer is forty-two\n")
    assert said.count("--- assistant") >= 1
    (one,) = read_trajectories(tmp_path / "one" / "trajectories" / "train_000001.parquet")
    before, (window,) = trajectory.transcripts[0], one.transcripts
    assert window.ids[: last.end] == before.ids[: last.end] and window.logprobs[: last.end] == before.logprobs
    assert [turn.role for turn in one.turns[: at + 2]] == [
        *(turn.role for turn in trajectory.turns),
        "tool",
        "assistant",
    ]
    assert one.turns[at].text == "the answer is forty-two" and one.turns[at].start == last.end
    assert one.score is None and sum(window.mask[one.turns[at].start : one.turns[at].end]) == 0
    # The record of that: it is sampled again as any other, and an edit that changes nothing goes on the same.
    shutil.copy(tmp_path / "one" / "trajectories" / "train_000001.parquet", path)
    assert replay([str(run), "--trust", "--uid", trajectory.uid, "--out", str(tmp_path / "two")]) == 0
    assert replay([str(run), *edited, "--out", str(tmp_path / "three")]) == 0
    for name in ("two", "three"):
        (other,) = read_trajectories(tmp_path / name / "trajectories" / "train_000001.parquet")
        assert (other.transcripts[0].ids, other.transcripts[0].mask) == (window.ids, window.mask)
        assert [(turn.role, turn.text) for turn in other.turns] == [(turn.role, turn.text) for turn in one.turns]


def test_one_of_several_answers_is_another() -> None:
    """The others, and the request for a final answer behind them, stay as they were."""
    calls = [ToolCallRecord(name, {}, ToolAnswer(text)) for name, text in (("add", "1"), ("look", "2"))]
    answered = Turn("assistant", "", 0, 5, 9, calls)
    names = [("a", "add"), ("b", "look")]
    tool = Turn("tool", f"1\n2\n{FINAL_ANSWER_REQUEST}", 0, 9, 12)
    found = _messages(tool, answered, Edit(1, "three", 1), names)
    assert [(one["role"], one["content"]) for one in found] == [
        ("tool", "1"),
        ("tool", "three"),
        ("user", FINAL_ANSWER_REQUEST),
    ]
    assert [one["tool_call_id"] for one in found[:2]] == ["a", "b"]
    assert _messages(replace(tool, role="user"), answered, Edit(1, "why?"), names) == [
        {"role": "user", "content": "why?"}
    ]
    with naming(DataError, "chat"):
        _messages(tool, answered, Edit(1, "three", 1), names[:1])


@pytest.mark.parametrize(
    ("text", "response", "wanted"),
    [
        ("\n\n<information>for</information>\n\n", "for", "\n\n<information>NEW</information>\n\n"),
        ("\nObservation: 7 apples\nThought:", "7 apples", "\nObservation: NEW\nThought:"),
        ("[the answer: a]", "a]", "[the answer: NEW"),
        ("\nThought: Thought:\nThought:", "Thought:", None),
        ("\n\n<information>&lt;/answer></information>\n\n", "</answer>", None),
    ],
)
def test_an_answer_inside_a_turn_is_replaced_in_its_layout(text: str, response: str, wanted: str | None) -> None:
    edit = Edit(2, "NEW", 0)
    if wanted is None:
        with naming(DataError, "--call 0", "turn 2"):
            _replaced(text, response, edit)
    else:
        assert _replaced(text, response, edit) == wanted


def test_messages_of_an_example_before_the_policys_stay() -> None:
    shown = ("user", "q"), ("assistant", "a"), ("user", "real question"), ("assistant", "said")
    old = Trajectory("train/1/0/0", 0, "d", "tool_agent")
    old.messages = [{"role": role, "content": text} for role, text in shown]
    old.turns = [Turn("assistant", "said", 0, 0, 0)]
    other = [Turn("assistant", "other", 0, 0, 0)]
    assert [one["content"] for one in unscored(old, [], other).messages] == ["q", "a", "real question", "other"]


@pytest.mark.parametrize("name", ["/etc/hostname", "../../../etc/hostname", "", "0123"])
def test_an_image_is_a_file_of_the_run(tmp_path: Path, name: str) -> None:
    file = tmp_path / "trajectories" / "greedy_000001.parquet"
    with naming(DataError, file, "greedy/1/0/greedy", repr(name)):
        _recorded(Trajectory("greedy/1/0/greedy", 0, "d", "tool_agent"), [[(0, name)]], Config(), file)


def test_what_was_sampled_from_a_kept_cache_says_so() -> None:
    said = line_of(Comparison(Stretch(1, 0, 5, 9, 3, 0, kept=True), None, same_logprobs=4))
    assert said.startswith("turn 1 (version 3, sampled from keys and values of older weights, in part")
    assert line_of(Comparison(Stretch(1, 0, 5, 9, 3, 0), None, same_logprobs=4)).startswith("turn 1 (version 3): 4")


def test_a_config_that_somebody_sent_runs_no_code(hostile: Hostile, capsys: pytest.CaptureFixture[str]) -> None:
    hostile.config(
        **{
            "actor_rollout_ref.model.trust_remote_code": True,
            "actor_rollout_ref.rollout.multi_turn.tool_config_path": str(hostile.tools),
        }
    )
    for more in ([], ["--turn", "1", "--message", "x"]):
        assert replay([str(hostile.folder), "--uid", "train/2/0/0", *more]) == 2
        said = capsys.readouterr().err
        assert "trust_remote_code=true names code" in said and "tool_config_path=" in said and "--trust" in said
    assert not hostile.marker.exists()


def test_a_replays_texts_obey_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    call = ToolCallRecord("\x1b[2J", {"x": "\x1b[0m"}, ToolAnswer())
    print_turn(Turn("assistant", "\x1b]0;owned\x07\tdone", 0, 0, 0, [call]))
    told = capsys.readouterr().out
    assert "\x1b" not in told and "owned" in told and "done" in told
