"""A run scored again by `python -m agentrl.evaluate`: numbers by hand, whole groups, no scorer asked twice."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.evaluate import main
from agentrl.offline.comparison import Comparison
from agentrl.offline.intervals import of_mean
from agentrl.offline.scores import Earlier, Responses, Scores
from agentrl.trajectory import Cause, Status, Trajectory
from agentrl.trajectory.parquet import write_trajectories
from agentrl.trajectory.sample import Sample
from agentrl.view.run import open_run
from agentrl.view.viewer import Viewer
from tests.naming import assert_names
from tests.runs import refused
from tests.trajectory.written import Writer

fails = partial(refused, main)

READS = "def compute_score(solution_str):\n    return {'score': float(solution_str), 'length': len(solution_str)}\n"
"""Scorer for which a response is its own score."""


def recorded(step: int, group: int, k: int, first: float | None, text: str, turn: float | None = None) -> Trajectory:
    """A trajectory with its first score; `text` is what the second scorer reads."""
    writer = Writer(f"prompt {group}", f"train/{step}/{group}/{k}", group, "mine").says(text, reward=turn)
    if first is None:
        return writer.ends(None, Status.FAILED, "scorer: it was down", Cause.SCORER)
    return writer.ends(first)


def run_of(folder: Path, steps: dict[int, Sequence[Trajectory]], **more: Any) -> Path:
    for step, trajectories in steps.items():
        write_trajectories(
            folder / "trajectories", trajectories, step=step, split="train", **{"turn_reward_coef": 1.0, **more}
        )
    return folder


def scorer(folder: Path, text: str = READS) -> str:
    path = folder / "reward.py"
    path.write_text(text)
    return f"custom_reward_function.path={path}"


def numbers(run: Path, tmp_path: Path, *more: str) -> dict[str, Any]:
    out = tmp_path / "scores.json"
    assert main([f"data.path={run}", f"data.output_path={out}", *more]) == 0
    written: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return written


GROUPS: list[list[tuple[float | None, str]]] = [
    [(1.0, "0.2"), (0.0, "0.8")],  # the other way round
    [(1.0, "1"), (1.0, "0")],  # gets a signal
    [(1.0, "0.6"), (0.0, "0.6")],  # loses it
    [(None, "1"), (1.0, "no number"), (0.5, "0.5")],  # one with the second score alone, one with the first alone
]
FIRST, SECOND = [1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.5], [0.2, 0.8, 1.0, 0.0, 0.6, 0.6, 0.5]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    made = [
        recorded(1, group, k, first, text)
        for group, members in enumerate(GROUPS)
        for k, (first, text) in enumerate(members)
    ]
    return run_of(tmp_path / "run", {1: made})


def test_numbers_counted_by_hand(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("reward_model.success_threshold=0.5", "data.on_code_error=count")
    written = numbers(run, tmp_path, scorer(tmp_path), *keys)
    assert written["all"]["responses"] == 9 and written["all"]["failures"] == 1
    compared = written["comparison"]
    assert compared["all"] == compared["sources"]["mine"]
    found = compared["all"]
    assert (found["responses"], found["only_first"], found["only_second"]) == (7, 1, 1)
    assert found["mean_first"] == pytest.approx(np.mean(FIRST))
    assert found["mean_second"] == pytest.approx(np.mean(SECOND))
    assert found["agreement"] == pytest.approx(3 / 7), "1 and 1, 1 and 0.6, 0.5 and 0.5 are on the same side"
    # Of the pairs within groups the first orders two, the second two, and only one pair is ordered by both.
    assert found["tau_within_groups"] == pytest.approx(-1 / 2)
    assert found["rank_correlation"] == pytest.approx(spearman(FIRST, SECOND))
    assert found["groups"] == 3, "the fourth has one response with both scores"
    shares = [found[name] for name in ("signal_first", "signal_second", "signal_gained", "signal_lost", "sign_changed")]
    assert shares == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert found["responses_sign_changed"] == 2
    out = capsys.readouterr().out.splitlines()
    assert any(line.split()[:4] == ["mine", "7", "0.6429", "0.5286"] for line in out)
    assert "train/1/1/1: 1, now 0" in out


def test_what_differs_opens_in_the_viewer(run: Path, tmp_path: Path) -> None:
    compared = numbers(run, tmp_path, scorer(tmp_path), "data.on_code_error=count")["comparison"]
    assert compared["viewer"] == f"python -m agentrl.view {run}"
    different = compared["different"]
    assert [one["uid"] for one in different] == [
        *("train/1/1/1", "train/1/0/0", "train/1/0/1", "train/1/2/1", "train/1/2/0")
    ]
    assert (different[0]["first"], different[0]["second"], different[0]["text"]) == (1.0, 0.0, "0")
    viewer = Viewer([open_run(str(run))])
    for one in different:
        number, part, row = one["page"].removeprefix("#/run/").replace("trajectory/", "").split("/")
        assert viewer.trajectory((int(number), part, int(row)))["uid"] == one["uid"]


def test_the_reward_is_compared_not_the_score_alone(tmp_path: Path) -> None:
    """Turn rewards turn the order of the scores round, before and after: nothing changes for training."""
    made = [recorded(1, 0, 0, 1.0, "0.9"), recorded(1, 0, 1, 0.0, "0.8", turn=3.0)]
    found = numbers(run_of(tmp_path / "run", {1: made}), tmp_path, scorer(tmp_path))["comparison"]["all"]
    assert (found["sign_changed"], found["tau_within_groups"]) == (0.0, 1.0)
    made = [recorded(1, 0, 0, 1.0, "0"), recorded(1, 0, 1, 0.0, "0", turn=0.5)]
    found = numbers(run_of(tmp_path / "other", {1: made}), tmp_path, scorer(tmp_path))["comparison"]["all"]
    assert found["sign_changed"] == 1.0, "without its score the first has the smaller reward"


def test_a_group_of_two_files_is_scored_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two workers wrote the trajectories of each prompt; a scorer by group is given all of them."""
    folder = tmp_path / "run"
    for number in (1, 2):
        part = [recorded(3, group, number, 0.0, str(number)) for group in range(3)]
        write_trajectories(
            folder / "trajectories", part, step=3, split="train", share=(number, 2), turn_reward_coef=1.0
        )
    (tmp_path / "best.py").write_text(
        "from agentrl.reward import GroupRewardManager\n"
        "from agentrl.reward.scorer import Verdict\n"
        "class Best(GroupRewardManager):\n"
        "    async def score_group(self, trajectories, sample):\n"
        "        texts = [one.turns[0].text for one in trajectories]\n"
        "        return [Verdict(float(len(texts) == 2 and text == max(texts)), {}) for text in texts]\n"
    )
    written = numbers(folder, tmp_path, f"reward_model.reward_manager={tmp_path}/best.py:Best")
    assert (written["all"]["rows"], written["all"]["mean"]) == (3, 0.5)
    assert written["comparison"]["all"]["signal_gained"] == 1.0
    assert "missing" not in capsys.readouterr().out
    (folder / "trajectories" / "train_000003.2of2.parquet").unlink()
    numbers(folder, tmp_path, scorer(tmp_path))
    assert_names(capsys.readouterr().out, "train_000003.1of2.parquet", "2 files", "missing")


def test_greedy_baselines_are_left_out_and_batches_kept_apart(tmp_path: Path, capsys: Any) -> None:
    """Groups of a further generation batch are numbered from 0 again: they are other groups."""
    folder = tmp_path / "run"
    greedy = recorded(1, 0, 9, 1.0, "1")
    greedy.baseline = True
    run_of(folder, {1: [recorded(1, 0, 0, 1.0, "1"), greedy]})
    write_trajectories(
        folder / "trajectories", [recorded(1, 0, 1, 0.0, "1")], step=1, split="train", part="_001", turn_reward_coef=1.0
    )
    written = numbers(folder, tmp_path, scorer(tmp_path))
    assert (written["all"]["rows"], written["all"]["responses"]) == (2, 2)
    assert_names(capsys.readouterr().out, "1 greedy")


def test_steps_are_chosen(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", {step: [recorded(step, 0, 0, 1.0, str(step))] for step in range(1, 7)})
    function = scorer(tmp_path)
    for given_, mean in (("[2,5]", 3.5), ("2:4", 2.5), ("5:", 5.5), (":3", 1.5), ("4", 4.0)):
        assert numbers(run, tmp_path, function, f"data.steps={given_}")["all"]["mean"] == mean, given_


def test_a_killed_command_asks_no_scorer_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("agentrl.offline.recorded.CHUNK_ROWS", 4)
    run = run_of(
        tmp_path / "run", {step: [recorded(step, 0, k, 0.0, f"{step}.{k}") for k in range(4)] for step in (1, 2, 3)}
    )
    log, stop = tmp_path / "log", tmp_path / "stop"
    function = scorer(
        tmp_path,
        "from pathlib import Path\n"
        "def compute_score(trajectory):\n"
        f"    if trajectory.uid.startswith('train/2/') and Path({str(stop)!r}).exists():\n"
        "        raise KeyError('killed')\n"
        f"    with open({str(log)!r}, 'a') as file:\n"
        "        file.write(trajectory.uid + '\\n')\n"
        "    return {'score': float(trajectory.turns[0].text), 'one': 1}\n",
    )
    whole = numbers(run, tmp_path, function)
    log.unlink()
    stop.touch()
    command = [f"data.path={run}", function, f"data.scores_path={tmp_path}/scores.parquet"]
    fails(command, capsys, "KeyError: 'killed'")
    assert not (tmp_path / "scores.parquet").exists()
    fails([*command, "data.steps=[1]"], capsys, "data.steps")
    stop.unlink()
    assert numbers(run, tmp_path, *command[1:]) == whole
    assert len(log.read_text().split()) == len(set(log.read_text().split())) == 12
    assert not (tmp_path / "scores.parquet.parts").exists()
    table = pq.read_table(tmp_path / "scores.parquet").to_pylist(maps_as_pydicts="strict")
    assert [one["score"] for one in table] == [step + k / 10 for step in (1, 2, 3) for k in range(4)]
    assert {name: value for name, value in table[5].items() if name != "content"} == {
        **{"uid": "train/2/0/1", "step": 2, "row": 1, "data_source": "mine", "first": 0.0, "score": 2.1},
        **{"failure": None, "extra": {"one": 1.0}},
    }
    fails(command, capsys, "data.scores_path", "exists already")


def test_scores_of_more_responses_than_the_data_have_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("agentrl.offline.recorded.CHUNK_ROWS", 1)
    run = run_of(tmp_path / "run", {step: [recorded(step, 0, 0, 0.0, text)] for step, text in ((1, "1"), (2, "2"))})
    run_of(run, {3: [recorded(3, 0, 0, 0.0, "no number")]})
    command = [f"data.path={run}", scorer(tmp_path), f"data.scores_path={tmp_path}/scores.parquet"]
    fails(command, capsys, "no number")
    for step in (2, 3):
        (run / f"trajectories/train_{step:06d}.parquet").unlink()
    fails(command, capsys, "scores of 1 more responses than the data")


@pytest.mark.parametrize("changed", ["responses", "reward_model"])
def test_scores_of_other_content_at_the_same_places_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, changed: str
) -> None:
    monkeypatch.setattr("agentrl.offline.scores.CHUNK_ROWS", 1)
    file, more = str(tmp_path / "rows.parquet"), {"data_source": "mine"}
    rows = [{**more, "responses": text, "reward_model": {"ground_truth": text}} for text in ("1", "2", "no number")]
    pq.write_table(pa.Table.from_pylist(rows), file)
    command = [f"data.path={file}", scorer(tmp_path), f"data.scores_path={tmp_path}/scores.parquet"]
    fails(command, capsys, "no number")
    other = {"responses": "3", "reward_model": {"ground_truth": "3"}}[changed]
    pq.write_table(pa.Table.from_pylist([{**rows[0], changed: other}, rows[1], {**rows[2], "responses": "4"}]), file)
    fails(command, capsys, "scores of other responses", "row 0")
    pq.write_table(pa.Table.from_pylist([*rows[:2], {**rows[2], "responses": "4"}]), file)
    assert main(command) == 0


class Judge(BaseHTTPRequestHandler):
    """An endpoint whose verdict is the number that ends the conversation, or by its length.

    After `most` verdicts it refuses.
    """

    most = 1 << 30
    judged: list[str] = []
    rubrics: list[str] = []

    def do_GET(self) -> None:
        self._answer(200, {"object": "list", "data": [{"id": "m"}]})

    def do_POST(self) -> None:
        rubric, asked = (
            one["content"] for one in json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"]
        )
        conversation = json.loads(asked[asked.index("\n[") : asked.rindex("]\n") + 1])
        if len(self.judged) >= self.most:
            return self._answer(400, {"error": {"message": "no credit is left"}})
        self.judged.append(conversation[-1]["content"])
        self.rubrics.append(rubric)
        said = conversation[-1]["content"]
        verdict = json.dumps({"reason": "so", "score": int(said) if said.isdecimal() else len(said) % 11})
        self._answer(200, {"choices": [{"index": 0, "message": {"content": verdict}, "finish_reason": "stop"}]})

    def _answer(self, status: int, body: object) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return None


@pytest.fixture
def judge() -> Iterator[tuple[type[Judge], list[str]]]:
    handler = type("OneJudge", (Judge,), {"judged": [], "rubrics": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    keys = [
        f"reward_model.judge.base_url=http://127.0.0.1:{server.server_port}/v1",
        "reward_model.judge.model=m",
        "reward_model.judge.data_sources=[mine]",
    ]
    yield handler, keys
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_judge_that_falls_silent(judge: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """No score is 0 for it; what it judged is kept, and the same command goes on with the rest."""
    handler, keys = judge
    monkeypatch.setattr("agentrl.offline.recorded.CHUNK_ROWS", 32)
    monkeypatch.setattr("agentrl.offline.evaluate.DOWN", 16)
    made = [recorded(1, group, k, k / 10, str(k)) for group in range(20) for k in range(4)]
    run = run_of(tmp_path / "run", {1: made})
    handler.most = 32
    command = [f"data.path={run}", *keys, f"data.scores_path={tmp_path}/scores.parquet"]
    assert main(command) != 0
    said = capsys.readouterr().err
    assert "scored none of 32 responses" in said and "no credit is left" in said and "same command continues" in said
    handler.most = 1 << 30
    written = numbers(run, tmp_path, *command[1:])
    assert len(handler.judged) == 80
    assert (written["all"]["failures"], written["comparison"]["all"]["agreement"]) == (0, 1.0)
    assert written["comparison"]["all"]["mean_difference"] == pytest.approx(0.0)
    assert written["comparison"]["different"] == []


def test_the_runs_own_config_names_no_code(run: Path, tmp_path: Path, capsys: Any) -> None:
    """A folder from a stranger: its scorer is not loaded, so its data source has no scorer."""
    (run / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    (run / "config.yaml").write_text(f"custom_reward_function:\n  path: {run}/evil.py\n")
    fails([f"data.path={run}"], capsys, "data_source 'mine' has no scorer", f"{run}/trajectories")
    assert not (tmp_path / "ran").exists()


def test_scores_of_generate_are_compared(tmp_path: Path, capsys: Any) -> None:
    rows = [
        {"responses": ["1", "0"], "response_score": [1.0, None]},
        {"responses": ["0.5", "2"], "response_score": [0.5, 3]},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "out.parquet")
    compared = numbers(tmp_path / "out.parquet", tmp_path, scorer(tmp_path))["comparison"]
    assert (compared["all"]["responses"], compared["all"]["only_second"], compared["viewer"]) == (3, 1, None)
    assert [(one["uid"], one["first"], one["second"]) for one in compared["different"]] == [("1/1", 3.0, 2.0)]
    for wrong in ([1.0], [1.0, float("nan")], [float("inf"), None]):
        rows[0]["response_score"] = wrong
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "out.parquet")
        fails([f"data.path={tmp_path}/out.parquet", scorer(tmp_path)], capsys, "row 0", "response_score")


def test_a_recorded_score_that_is_no_number_is_named(tmp_path: Path, capsys: Any) -> None:
    run = run_of(tmp_path / "run", {1: [recorded(1, 0, 0, 0.0, "1"), recorded(1, 0, 1, float("nan"), "2")]})
    fails([f"data.path={run}", scorer(tmp_path)], capsys, "train_000001.parquet", "row 1", "nan")


def test_a_group_of_many_responses_is_compared_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [str(k) for k in range(40)]
    earlier = [Earlier(text, float(k % 3)) for k, text in enumerate(texts)]
    row = Responses(Sample([{"role": "user", "content": "?"}], "mine", ""), texts, None, earlier)
    scores = Scores("mine", [float(k % 4) for k in range(40)], [{}] * 40, [])

    def found() -> dict[str, Any]:
        compared = Comparison(1.0)
        compared.add(row, scores)
        return compared.numbers()

    whole = found()
    assert whole["tau_within_groups"] == pytest.approx(kendall([k % 3 for k in range(40)], [k % 4 for k in range(40)]))
    monkeypatch.setattr("agentrl.offline.comparison.COMPARED", 90)
    assert found() == whole


def empty(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text("{}\n")


def columns_missing(folder: Path) -> None:
    path = next((folder / "trajectories").iterdir())
    pq.write_table(pq.read_table(path).drop_columns(["turns", "score"]), path)


def other_version(folder: Path) -> None:
    path = next((folder / "trajectories").iterdir())
    table = pq.read_table(path)
    place = table.schema.names.index("status")
    status = pa.array(["completed"] * (table.num_rows - 1) + ["pending"])
    pq.write_table(table.set_column(place, "status", status), path)


def cut(folder: Path) -> None:
    path = next((folder / "trajectories").iterdir())
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("spoil", "keys", "says"),
    [
        (None, ["data.steps=[7,8]"], ["data.steps=[7, 8]", "recorded are 1 steps from 1 to 1"]),
        (None, ["data.steps=first"], ["data.steps=first", "10:20"]),
        (None, ["data.split=val"], ["data.split=val", "are of train"]),
        (empty, [], ["no recorded trajectories", "trainer.save_trajectories"]),
        (columns_missing, [], ["train_000001.parquet", "score, turns are missing", "another version"]),
        (other_version, [], ["train_000001.parquet, row 8 (the first is 0)", "'pending'", "data.steps"]),
        (cut, [], ["train_000001.parquet", "cannot be read", "Copy the file again"]),
    ],
)
def test_bad_input(
    spoil: Callable[[Path], None] | None, keys: list[str], says: list[str], run: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = run
    if spoil is empty:
        folder = tmp_path / "empty"
        folder.mkdir()
    if spoil is not None:
        spoil(folder)
    fails([f"data.path={folder}", scorer(tmp_path), *keys], capsys, *says)


def test_keys_of_other_data_are_refused(run: Path, tmp_path: Path, capsys: Any) -> None:
    pq.write_table(pa.Table.from_pylist([{"responses": "1"}]), tmp_path / "out.parquet")
    for key in ("data.steps=[1]", "data.split=val"):
        fails([f"data.path={tmp_path}/out.parquet", scorer(tmp_path), key], capsys, key, "no effect")
    fails([f"data.path={run}", scorer(tmp_path), "data.response_key=a"], capsys, "data.response_key=a", "no effect")


def test_two_runs_and_long_truths(run: Path, tmp_path: Path, capsys: Any) -> None:
    fails([f"data.path=[{run},{run}]", scorer(tmp_path)], capsys, "data.path names 2 places", str(run))
    gsm8k = Writer("q", "train/1/0/0", 0, "gsm8k").says("#### 1").ends(1.0)
    gsm8k.ground_truth = "1" * 20_000
    other = run_of(tmp_path / "other", {1: [gsm8k]})
    fails([f"data.path={other}"], capsys, "no reward_model.ground_truth", "more than 10,000 characters", "row 0")


def test_without_earlier_scores_it_says_so(tmp_path: Path, capsys: Any) -> None:
    run = run_of(tmp_path / "run", {1: [recorded(1, 0, k, None, "1") for k in range(2)]})
    assert "comparison" not in numbers(run, tmp_path, scorer(tmp_path))
    assert_names(capsys.readouterr().out, "nothing is compared")


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The coefficient by its definition, one value after the other."""
    one, other = (
        [sum(b < a for b in values) + (sum(b == a for b in values) + 1) / 2 for a in values]
        for values in (first, second)
    )
    return float(np.corrcoef(one, other)[0, 1])


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """The coefficient tau-b by its definition, pair by pair."""
    pairs = list(itertools.combinations(zip(first, second, strict=True), 2))
    agree = sum(np.sign(a - c) * np.sign(b - d) for (a, b), (c, d) in pairs)
    return float(agree / np.sqrt(sum(a != c for (a, _), (c, _) in pairs) * sum(b != d for (_, b), (_, d) in pairs)))


def test_ranks_are_scipys() -> None:
    """Numbers of scipy.stats 1.17."""
    first, second = [1, 2, 2, 0.5, 3, 0.5], [0, 2, 1, 1, 2, 0]
    assert spearman(first, second) == pytest.approx(0.7385489458759965)
    assert kendall(first, second) == pytest.approx(0.6405126152203486)


SCORE = st.sampled_from([0.0, 0.25, 0.5, 1.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SCORE, SCORE), min_size=2, max_size=12))
def test_ranks_are_by_their_definitions(pairs: list[tuple[float, float]]) -> None:
    first, second = [one for one, _ in pairs], [one for _, one in pairs]
    row = Responses(Sample([], "x", "single_turn"), [""] * len(pairs), None, [Earlier("u", one) for one in first])
    compared = Comparison(1.0)
    compared.add(row, Scores("x", [*second], [{} for _ in pairs], []))
    found = compared.numbers()
    if len(set(first)) < 2 or len(set(second)) < 2:
        assert found["tau_within_groups"] is None and found["rank_correlation"] is None
        return
    assert found["tau_within_groups"] == pytest.approx(kendall(first, second))
    assert found["rank_correlation"] == pytest.approx(spearman(first, second))


def test_the_interval_counts_groups() -> None:
    """Responses of a group that are all alike are one observation; groups of one give the usual interval."""
    values = np.array([0.0, 1.0, 2.0, 5.0])
    low, high = of_mean(values, [1, 1, 1, 1]) or (0.0, 0.0)
    assert low is not None and high is not None
    half = 1.96 * values.std(ddof=1) / 2
    assert (low, high) == pytest.approx((2.0 - half, 2.0 + half))
    assert of_mean(np.repeat(values, 8), [8] * 4) == pytest.approx((low, high))
    assert of_mean(values, [4]) is None
