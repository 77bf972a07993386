"""The index of what is viewed: which files are found, what is no run, what is read on while it is written."""

from __future__ import annotations

import json
from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer

from agentrl.errors import DataError
from agentrl.trajectory.parquet import SCHEMA, to_row, write_trajectories
from agentrl.view.folder import Folder
from agentrl.view.json_lines import JsonLines
from agentrl.view.parts import recorded
from agentrl.view.questions import CHILDREN
from agentrl.view.run import Run, open_run
from agentrl.view.viewer import Viewer
from tests.naming import Names, assert_names, naming
from tests.view.made import add_metrics, as_seen, make_run, played


def refreshed(run: Run) -> Run:
    run._listed = float("-inf")
    run.refresh()
    return run


def test_names_tell_sets_steps_shares_and_further_batches() -> None:
    names = [
        "train_000012.parquet",
        "train_000013.1of2.parquet",
        "train_000013.2of2.parquet",
        "train_000012_001.parquet",
        "val_000000_sampled.parquet",
        "val_000000_sampled_000064.parquet",
        ".train_000014.parquet.partial",
        "notes.txt",
    ]
    stamp = next(iter(Folder(str(Path(__file__).parent)).files().values()))
    updates = {name: f"updates/{name}" for name in ("train_000013.2of2.parquet", "train_000012_001.parquet")}
    found = {one.name: one for one in recorded(dict.fromkeys(names, stamp), "trajectories/", updates)}
    assert {(one.name, one.set, one.step, one.batch) for one in found.values()} == {
        ("train_000012", "train", 12, ""),
        ("train_000013.1of2", "train", 13, ""),
        ("train_000013.2of2", "train", 13, ""),
        ("train_000012_001", "train", 12, "_001"),
        ("val_000000_sampled", "val_sampled", 0, ""),
        ("val_000000_sampled_000064", "val_sampled", 0, "_000064"),
    }
    assert found["train_000013.2of2"].update == "updates/train_000013.2of2.parquet"
    assert found["train_000013.1of2"].update is None
    assert found["train_000012_001"].update == "updates/train_000012_001.parquet"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda folder: None, "no such folder"),
        (lambda folder: folder.mkdir(), "not a run"),
        (lambda folder: make_run(folder / "a", 1), "/x/a"),
        (lambda folder: folder.write_text("x"), "nothing is known"),
    ],
    ids=["nothing", "empty", "above", "file"],
)
def test_no_run_is_said_in_words(tmp_path: Path, make, says: Names) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "x")
    with naming(DataError, says):
        open_run(str(tmp_path / "x"))


def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 2)
    file = folder / "trajectories" / "train_000001.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    viewer = Viewer([open_run(str(folder))])
    damaged = as_seen(viewer.step(0, "train", 1))
    assert damaged["rows"] == []
    assert_names(str(damaged["problems"]), "train_000001.parquet")
    assert len(as_seen(viewer.step(0, "train", 2))["rows"]) == 8
    with naming(DataError, "copy"):
        as_seen(viewer.trajectory((0, "train_000001", 0)))


def test_lines_are_read_on_when_they_are_whole(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(Folder(str(tmp_path)), "metrics.jsonl")
    assert not lines.refresh(None)
    file.write_text('{"step": 1}\n{"step": 2')
    assert lines.refresh(file.stat().st_size)
    assert lines.rows == [{"step": 1}]
    file.write_text('{"step": 1}\n{"step": 2}\nno JSON\n')
    lines.refresh(file.stat().st_size)
    assert (lines.rows, lines.unreadable) == ([{"step": 1}, {"step": 2}], 1)
    file.write_text('{"step": 7, "as long as": "it was before, and longer"}\n')  # another run in its place
    lines.refresh(file.stat().st_size)
    assert [row["step"] for row in lines.rows] == [7]


def test_lines_of_steps_that_are_done_again_take_the_place_of_the_first(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines = JsonLines(Folder(str(tmp_path)), "metrics.jsonl")
    for steps in (["1", "2.5", "3.5"], ["1", "2.25", "3.25", "4"]):
        file.write_text("".join(f'{{"step": {int(float(one))}, "loss": {one}}}\n' for one in steps))
        lines.refresh(file.stat().st_size)
    assert ([row["loss"] for row in lines.rows], lines.unreadable) == ([1, 2.25, 3.25, 4], 0)
    assert lines.newest == {"step": 4, "loss": 4}


def test_a_run_that_goes_on_is_seen_to(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 1)
    run = open_run(str(folder))
    before = run.version
    assert refreshed(run).version == before
    add_metrics(folder, 2)
    write_trajectories(folder / "trajectories", [played(2, 0, 0)], step=2, split="train", turn_reward_coef=1.0)
    assert refreshed(run).version > before
    assert [one.step for one in run.parts] == [1, 2]
    assert run.metrics.rows[-1]["step"] == 2


def test_the_config_is_the_one_that_a_resumed_run_wrote(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", steps=1, groups=1)
    run = open_run(str(folder))
    before, version = run.config, run.version
    (folder / "config.yaml").write_text("trainer: {seed: 12345}\n")
    assert refreshed(run).config == {"trainer.seed": 12345} != before
    assert run.version > version


def test_its_trajectories_alone_open_with_what_belongs_to_them(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 2)
    run = open_run(str(folder / "trajectories"))
    assert (run.kind, run.tokens.is_known) == ("run", True)
    assert [one.update for one in run.parts] == [None, "updates/train_000002.parquet"]
    (folder / "trajectories").rename(tmp_path / "some")
    assert [one.name for one in open_run(str(tmp_path / "some")).parts] == ["train_000001", "train_000002"]


def test_files_of_older_runs_open(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 1)
    file = folder / "trajectories" / "train_000001.parquet"
    lacking = ["policy", "model_reward", "images", "metrics", "score_extra", "reward"]
    pq.write_table(pq.read_table(file).drop_columns(lacking), file)
    viewer = Viewer([open_run(str(folder))])
    (row, *_) = as_seen(viewer.step(0, "train", 1))["rows"]
    assert (row["score"], row["reward"], row["seconds"]) == (1.0, None, None)
    record = as_seen(viewer.trajectory((0, "train_000001", 0)))
    (window,) = record["transcripts"]
    assert (window["images"], window["policy"]) == ([], None)


def test_other_outputs_open(tmp_path: Path) -> None:
    lines = [
        {"input": "Q1", "output": "A1", "score": 1.0, "step": 4, "acc": True},
        {"input": "Q1", "output": "A2", "score": 0},
    ]
    dump = tmp_path / "dump"
    dump.mkdir()
    (dump / "4.jsonl").write_text("\n".join(map(json.dumps, lines)))
    viewer = Viewer([open_run(str(dump)), open_run(str(dump / "4.jsonl"))])
    rows = as_seen(viewer.step(0, "dump", 4))["rows"]
    assert [(row["score"], row["group"], row["tokens"]) for row in rows] == [(1.0, 0, 0), (0.0, 0, 0)]
    assert as_seen(viewer.trajectory((0, "4", 0)))["score_extra"] == {"acc": 1.0}
    side = as_seen(viewer.group(1, "lines", 0))
    assert [one["pieces"][0]["text"] for one in side["members"]] == ["A1", "A2"]
    assert side["unit"] == "turns"

    generated = tmp_path / "out.parquet"
    record = pa.struct([field for field in SCHEMA if field.name not in ("step", "split")])
    own = to_row(played(1, 0, 0), 0, "generate", None)
    table = pa.table(
        {
            "prompt": [[{"role": "user", "content": "Q"}]],
            "responses": pa.array([["A", "B"]]),
            "response_score": pa.array([[1.0, None]]),
            "response_status": pa.array([["completed", "failed"]]),
        }
    )
    pq.write_table(table, generated)
    viewer = Viewer([open_run(str(generated))])
    rows = as_seen(viewer.step(0, "generate", 0))["rows"]
    assert [(row["uid"], row["score"], row["status"]) for row in rows] == [
        ("0/0", 1.0, "completed"),
        ("0/1", None, "failed"),
    ]
    pq.write_table(table.append_column("trajectories", pa.array([[own, own]], pa.list_(record))), generated)
    viewer = Viewer([open_run(str(generated))])
    assert len(as_seen(viewer.trajectory((0, "part_0", 1)))["transcripts"]) == 1

    scores = tmp_path / "scores.json"
    numbers = {"gsm8k": {"mean": 0.5}}, {"mean": 0.5}
    scores.write_text(json.dumps({"sources": numbers[0], "all": numbers[1], "comparison": {"all": {"responses": 1}}}))
    assert open_run(str(scores)).numbers == {"gsm8k": {"mean": 0.5}, "all": {"mean": 0.5}}

    sft = tmp_path / "sft"
    sft.mkdir()
    (sft / "metrics.jsonl").write_text('{"step": 1, "train/loss": 2.5}\n')
    (sft / "ended.txt").write_text("ended after step 1 of 9: enough\n")
    curves = Viewer([open_run(str(sft))]).curves(0)
    assert curves["series"] == {"train/loss": [2.5]} and curves["ended"] == "ended after step 1 of 9: enough"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"input": 5}', "line 1"),
        ("[", ("line 1", "JSON")),
        ("[]", "object"),
    ],
)
def test_a_line_that_is_no_rollout_is_named(tmp_path: Path, line: str, says: Names) -> None:
    (tmp_path / "1.jsonl").write_text(line)
    answer = Viewer([open_run(str(tmp_path))]).step(0, "dump", 1)
    assert_names(str(answer["problems"]), says)


def test_a_run_in_a_store_opens(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
    for name, value in (("DEFAULT_REGION", "us-east-1"), ("ACCESS_KEY_ID", "x"), ("SECRET_ACCESS_KEY", "x")):
        monkeypatch.setenv(f"AWS_{name}", value)
    CHILDREN.close()  # the next one knows of the server
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    try:
        store = fsspec.filesystem("s3")
        store.mkdir("bucket")
        store.put(str(run), "bucket/made", recursive=True)
        viewer = Viewer([open_run("s3://bucket/made")])
        assert len(as_seen(viewer.step(0, "train", 2))["rows"]) == 8
        record = as_seen(viewer.trajectory((0, "train_000002", 1)))
        assert record["tokenizer"]["known"]
        assert "advantages" in record["transcripts"][0]["values"]
        assert as_seen(viewer.curves(0))["steps"] == [1, 2, 3]
    finally:
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        CHILDREN.close()
        server.stop()
