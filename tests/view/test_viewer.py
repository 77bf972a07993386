"""Answers to the pages: a trajectory's numbers, groups side by side, exports and what they hide."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.errors import DataError
from agentrl.trajectory import FROZEN, Image, PlacedImage, Transcript
from agentrl.trajectory.parquet import SCHEMA, write_trajectories
from agentrl.view.export import COLUMNS, TEXTS, Hidden, exported, hide
from agentrl.view.images import MOST_BYTES
from agentrl.view.record import trajectory
from agentrl.view.run import open_run
from agentrl.view.tokens import TokenTexts, given_tokens
from agentrl.view.viewer import Viewer
from tests.naming import assert_names, naming
from tests.view.made import HOSTILE, TOKENIZER, Player, as_seen, ids_of, make_run, played, write_update
from tests.vision.tiny import encoded


def test_a_trajectory_is_shown_token_by_token(viewer: Viewer) -> None:
    record = as_seen(viewer.trajectory((0, "train_000002", 1)))
    (window,) = record["transcripts"]
    recorded = played(2, 0, 1).transcripts[0]
    assert (window["ids"], window["mask"]) == (recorded.ids, recorded.mask)
    texts = [record["tokens"][str(id)][0] for id in window["ids"][: window["prompt_length"]]]
    assert "".join(texts) == "<|im_start|>user\nHow much is 0 times 0?<|im_end|>\n<|im_start|>assistant\n"
    assert record["tokens"][str(ids_of("<|im_end|>")[0])] == ["<|im_end|>", b"<|im_end|>".hex(), True]
    assert record["tokens"][str(ids_of("é")[0])] == ["", "c3", False], "half a character is no text"
    off = [place for place, mask in enumerate(window["mask"]) if not mask]
    for name, values in window["values"].items():
        assert len(values) == len(window["ids"])
        assert all(values[place] is None for place in off), f"{name} has numbers where nothing was sampled"
    last = max(place for place, mask in enumerate(window["mask"]) if mask)
    gaps = [
        t - e
        for t, e in zip(window["values"]["trainer_logprobs"], window["values"]["logprobs"], strict=True)
        if t is not None
    ]
    assert gaps == [0.0] * (len(gaps) - 1) + [0.5], "the update's row of this uid, not that of its place"
    assert window["values"]["clipped"][last] == 1
    assert [call["name"] for turn in record["turns"] for call in turn["calls"]] == ["calculator"]


def test_rows_that_share_a_uid_take_theirs_in_order(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 2)
    run = open_run(str(folder))
    twins = [played(2, 0, 0), played(2, 0, 3), played(2, 1, 0)]
    for one in twins:
        one.uid = "the same"
    write_trajectories(folder / "trajectories", twins, step=2, split="train", turn_reward_coef=1.0)
    write_update(folder / "updates" / "train_000002.parquet", list(reversed(twins)))
    means = [viewer_mean(run, row) for row in range(3)]
    assert means == [1.0, -1.0, 1.0]


def viewer_mean(run: Any, row: int) -> float:
    record = as_seen(trajectory(run, run.part("train_000002"), row))
    return next(value for value in record["transcripts"][0]["values"]["advantages"] if value is not None)


def rewritten(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = pq.read_table(file)
    rows = table.to_pylist(maps_as_pydicts="lossy")
    for row in rows:
        change(row)
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), file)


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row["ids"][0].__setitem__(0, -5),
        lambda row: row["ids"][0].__setitem__(0, None),
        lambda row: row.update(mask=None),
        lambda row: row.update(mask=[[1]]),
        lambda row: row.update(prompt_length=[]),
        lambda row: row.update(prompt_length=[None]),
        lambda row: row.update(versions=None),
    ],
    ids=["negative", "no id", "no mask", "short mask", "no length", "null length", "no versions"],
)
def test_values_of_another_form_are_named(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    file = make_run(tmp_path / "x", 1, 1) / "trajectories" / "train_000001.parquet"
    rewritten(file, change)
    with naming(DataError, ("train_000001.parquet", "row 1")):
        Viewer([open_run(str(tmp_path / "x"))]).trajectory((0, "train_000001", 1))


def test_small_gaps_are_not_lost_in_rounding(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 2, 1)
    gap = np.float32(-0.25) - np.float32(-0.250002)
    rewritten(
        folder / "updates" / "train_000002.parquet",
        lambda row: row.update(trainer_logprobs=[[one and one - float(gap) for one in row["trainer_logprobs"][0]]]),
    )
    viewer = Viewer([open_run(str(folder))])
    route = "/api/run/0/trajectory/train_000002/0"
    written = contents(exported(viewer, [(0, "train_000002", 0)], Hidden()))["routes"][route]
    for record in (as_seen(viewer.trajectory((0, "train_000002", 0))), written):
        values = record["transcripts"][0]["values"]
        place = values["logprobs"].index(-0.25)
        assert values["logprobs"][place] - values["trainer_logprobs"][place] == pytest.approx(float(gap), rel=0.02)


def test_a_group_side_by_side(viewer: Viewer) -> None:
    side = as_seen(viewer.group(0, "train_000002", 1))
    assert [one["uid"] for one in side["members"]] == [f"train/2/1/{k}" for k in range(4)]
    rows = [played(2, 1, k).transcripts[0].ids for k in range(4)]
    shared = next(place for place, ids in enumerate(zip(*rows, strict=False)) if len({*ids}) > 1)
    assert side["common"] == shared
    whole = "".join(piece["text"] for piece in side["beginning"])
    assert whole.startswith("<|im_start|>user\nHow much is 1 times 0?")
    for one, ids in zip(side["members"], rows, strict=True):
        text = whole + "".join(piece["text"] for piece in one["pieces"])
        assert text == TOKENIZER.decode(ids, skip_special_tokens=False)
        if one["differs"] is not None:
            assert one["differs"] in [piece["start"] for piece in one["pieces"]] + [len(ids)]
            assert rows[0][: one["differs"]] == ids[: one["differs"]]
    assert [one["advantage"] for one in side["members"]] == [1.0, 1.0, 1.0, -1.0]


def test_the_same_prompt_at_two_steps(viewer: Viewer) -> None:
    others = as_seen(viewer.same_prompt((0, "train_000001", 0)))["rows"]
    assert {(row["step"], row["group"]) for row in others} == {(1, 0), (2, 0), (3, 0)}
    side = as_seen(viewer.side_by_side([(0, "train_000001", 0), (0, "train_000003", 3)]))
    assert [one["step"] for one in side["members"]] == [1, 3]


def test_runs_are_compared_by_their_keys(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 1)
    (other / "config.yaml").write_text("trainer:\n  seed: 2\n")
    overview = as_seen(Viewer([open_run(str(run)), open_run(str(other))]).overview())
    assert overview["differing"]["trainer.seed"] == [1, 2]
    assert [one["last"]["reward/mean"] for one in overview["runs"]] == [0.75, 0.25]


def test_a_run_shows_the_versions_that_wrote_it(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", 1)
    for folder, step, of in ((run, 0, "0.1.0"), (run, 4, "0.2.0"), (other, 0, "0.1.0")):
        record = folder / "versions.json"
        known = json.loads(record.read_text())["written_by"] if record.exists() else []
        known.append({"after_step": step, "versions": {"agentrl": of, "torch": "2.13.0"}})
        record.write_text(json.dumps({"format": 1, "written_by": known}))
    viewer = Viewer([open_run(str(run)), open_run(str(other))])
    assert [(one["after_step"], one["versions"]["agentrl"]) for one in as_seen(viewer.curves(0))["writers"]] == [
        (0, "0.1.0"),
        (4, "0.2.0"),
    ]
    differing = as_seen(viewer.overview())["differing"]
    assert differing["versions/agentrl"] == ["0.2.0", "0.1.0"] and "versions/torch" not in differing


@pytest.mark.parametrize(
    "place", [(0, "train_000009", 0), (0, "train_000001", 99), (1, "train_000001", 0), (0, "../config", 0)]
)
def test_what_is_not_there_is_said(viewer: Viewer, place: tuple[int, str, int]) -> None:
    with pytest.raises(DataError, match=r"no file of trajectories|has 8 trajectories|there is no run 1"):
        viewer.trajectory(place)


def test_without_a_tokenizer_ids_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 1)
    (folder / "policy" / "tokenizer.json").unlink()
    viewer = Viewer([open_run(str(folder))])
    record = as_seen(viewer.trajectory((0, "train_000001", 0)))
    assert record["tokens"] == {}
    assert "there is no tokenizer.json of the model made-up" in record["tokenizer"]["origin"]
    assert as_seen(viewer.group(0, "train_000001", 0))["beginning"][0]["text"].startswith("#")


@pytest.mark.parametrize("named", ["~nobody-here/model", "x" * 5000, "a/\\0b"])
def test_a_model_that_no_path_can_name_has_no_tokenizer(tmp_path: Path, named: str) -> None:
    folder = make_run(tmp_path / "x", 1)
    (folder / "policy" / "tokenizer.json").unlink()
    (folder / "config.yaml").write_text(f'model: {{path: "{named}"}}\n')
    record = as_seen(Viewer([open_run(str(folder))]).trajectory((0, "train_000001", 0)))
    assert record["tokens"] == {} and "no tokenizer.json" in record["tokenizer"]["origin"]


def test_a_tokenizer_can_be_named(run: Path, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "x", 1)
    (folder / "policy" / "tokenizer.json").unlink()
    record = as_seen(Viewer([open_run(str(folder), given_tokens(run / "policy"))]).trajectory((0, "train_000001", 0)))
    assert record["tokenizer"]["known"] and record["tokens"]
    with naming(DataError, "tokenizer.json"):
        given_tokens(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with naming(DataError, "cannot be read"):
        given_tokens(tmp_path)


def test_trajectories_that_are_all_alike_have_everything_in_common(viewer: Viewer) -> None:
    side = as_seen(viewer.side_by_side([(0, "train_000002", 0), (0, "train_000002", 0)]))
    assert side["common"] == len(played(2, 0, 0).transcripts[0])
    assert [(one["differs"], one["pieces"]) for one in side["members"]] == [(None, []), (None, [])]


def test_tokens_of_a_sentencepiece_vocabulary() -> None:
    from tokenizers import Tokenizer, decoders, models

    vocab = {"<unk>": 0, "▁a": 1, "<0xE2>": 2}
    made = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    texts = TokenTexts(made, "made")
    assert texts.describe([1, 2]) == {"1": (" a", "2061", False), "2": ("", "e2", False)}


def contents(text: str) -> Any:
    packed = re.search(r'id="data">([^<]*)<', text)
    assert packed is not None
    return json.loads(gzip.decompress(base64.b64decode(packed[1])))


def test_an_export_holds_what_was_chosen_and_nothing_else(viewer: Viewer) -> None:
    text = exported(viewer, [(0, "train_000002", 1), (0, "train_000002", 3), (0, "train_000003", 0)], Hidden())
    data = contents(text)
    assert set(data["routes"]) == {
        "/api/runs",
        "/api/run/0/step/train/2",
        "/api/run/0/step/train/3",
        "/api/run/0/trajectory/train_000002/1",
        "/api/run/0/trajectory/train_000002/3",
        "/api/run/0/trajectory/train_000003/0",
        "/api/run/0/group/train_000002/0",
    }
    assert [row["row"] for row in data["routes"]["/api/run/0/step/train/2"]["rows"]] == [1, 3]
    assert str(Path(viewer._runs[0].url).parent) not in json.dumps(data), "paths of this machine stay here"
    assert "http://" not in re.sub(r"http://www\.w3\.org/\S*", "", text)
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=[\"'](?!data:)", text)


@pytest.mark.parametrize("column", COLUMNS)
def test_what_is_left_out_is_nowhere_in_the_file(viewer: Viewer, column: str) -> None:
    secrets = {
        "prompts": "How much is",
        "responses": "<tool_call>",
        "answers": "no JSON",
        "uids": "train/2/0/3",
        "sources": "made/up",
    }
    data = contents(exported(viewer, [(0, "train_000002", 3)], Hidden.from_names([column], [])))
    record = data["routes"]["/api/run/0/trajectory/train_000002/3"]
    window = record["transcripts"][0]
    whole = json.dumps(data) + "".join(data["tokens"].get(str(id), ("", "", 0))[0] for id in window["ids"])
    if column in secrets:
        assert secrets[column] not in whole
    if column == "ids":
        assert {*window["ids"]} == {-1} and not data["tokens"]
    if column == "scores":
        assert record["reward"] is None and record["score"] is None
        assert not {"advantages", "token_rewards"} & {*window["values"]}, "the mean of them is the reward"
    if column not in (*TEXTS, "ids", "scores"):
        assert column not in window["values"]


@pytest.mark.parametrize("column", TEXTS)
def test_what_is_masked_shows_its_length_alone(viewer: Viewer, column: str) -> None:
    data = contents(exported(viewer, [(0, "train_000002", 3)], Hidden.from_names([], [column])))
    record = data["routes"]["/api/run/0/trajectory/train_000002/3"]
    if column == "prompts":
        assert record["messages"][1]["content"] == "███ ████ ██ █ █████ ██"
        assert {*record["transcripts"][0]["ids"][:10]} == {-1}
    if column == "answers":
        assert record["turns"][0]["calls"][0]["response"] == "██ ████"
    if column == "uids":
        assert record["uid"] == "█" * len("train/2/0/3")


@pytest.mark.parametrize("hidden", ["responses", "answers"])
def test_a_later_context_window_and_the_ground_truth_give_nothing_away(tmp_path: Path, hidden: str) -> None:
    player = Player("train/9/0/0", 0, "What is the code?")
    player.trajectory.ground_truth = "TRUTHSECRET"
    secrets = {"responses": "RESPONSESECRET", "answers": "ANSWERSECRET"}
    player.says(secrets["responses"]).hears(secrets["answers"])
    later = Transcript()  # as compaction makes it
    later.append_prompt(ids_of(f"<|im_start|>user\n{secrets['responses']} {secrets['answers']}<|im_end|>\n"))
    later.append_sampled(ids_of("done"), [-1.0] * 4, 3)
    player.trajectory.transcripts.append(later)
    viewer = Viewer([open_run(str(make_run(tmp_path / "run", 1, 0, more=[player.ends(1.0)])))])

    def whole(asked: Hidden) -> str:
        data = contents(exported(viewer, [(0, "train_000001", 0)], asked))
        windows = data["routes"]["/api/run/0/trajectory/train_000001/0"]["transcripts"]
        return json.dumps(data) + "".join(data["tokens"].get(str(id), "?")[0] for one in windows for id in one["ids"])

    assert_names(whole(Hidden()), *secrets.values(), "TRUTHSECRET")
    for asked in (Hidden.from_names([], [hidden]), Hidden.from_names([hidden], [])):
        found = whole(asked)
        assert secrets[hidden] not in found and "TRUTHSECRET" not in found
    assert "TRUTHSECRET" not in whole(Hidden.from_names(["truths"], []))


def test_the_name_that_a_call_chose_is_hidden_in_its_answers_message(tmp_path: Path) -> None:
    player = Player("train/9/0/0", 0, "Go.").says("called").hears("7")
    player.trajectory.messages[-1]["name"] = "NAMESECRET"
    viewer = Viewer([open_run(str(make_run(tmp_path / "run", 1, 0, more=[player.ends(1.0)])))])
    whole = [
        json.dumps(contents(exported(viewer, [(0, "train_000001", 0)], Hidden.from_names([], masked))))
        for masked in ([], ["responses"])
    ]
    assert ["NAMESECRET" in text for text in whole] == [True, False]


def test_a_turn_of_a_role_that_is_not_trained_is_a_response(tmp_path: Path) -> None:
    players = [
        Player(f"train/9/0/{k}", 0, "Your move?").says(f"move {k}").hears("FROZENSECRET", FROZEN) for k in (0, 1)
    ]
    for player in players:
        player.trajectory.messages[-1]["role"] = "assistant"  # as a loop writes its message
    run = make_run(tmp_path / "run", 1, 0, more=[player.ends(1.0) for player in players])
    places = [(0, "train_000001", 0), (0, "train_000001", 1)]
    data = contents(exported(Viewer([open_run(str(run))]), places, Hidden.from_names([], ["responses"])))
    assert "FROZENSECRET" not in json.dumps(data)
    shown = data["routes"]["/api/run/0/trajectory/train_000001/0"]
    turn = shown["turns"][1]
    assert {*shown["transcripts"][0]["ids"][turn["start"] : turn["end"]]} == {-1}


def test_columns_that_cannot_be_hidden_are_refused() -> None:
    with naming(DataError, "leave_out=prompt"):
        Hidden.from_names(["prompt"], [])
    with naming(DataError, "mask=ids"):
        Hidden.from_names([], ["ids"])


def test_hostile_texts_do_not_end_the_scripts_of_an_export(hostile_run: Path) -> None:
    viewer = Viewer([open_run(str(hostile_run))])
    text = exported(viewer, [(0, "train_000001", 4 + row) for row in range(len(HOSTILE))], Hidden())
    for attack in HOSTILE:
        assert attack not in text or attack in ("__proto__", "javascript:window.hacked=6")
    assert text.count("<script") == 3 and text.count("</script>") == 3


def pictured(folder: Path, *files: bytes) -> Path:
    """A run whose one trajectory has these files as images; the second is there no more."""
    player = Player("pictured", 0, "What is it?")
    for number, data in enumerate(files):
        image = Image(np.zeros((4, 2), np.float32), (1, 2, 2), 1, hashlib.blake2b(data, digest_size=16).digest(), data)
        player.window.images.append(PlacedImage(number, image))
    one = player.says("A").ends(1.0)
    shown = f"<image 24x16 {player.window.images[0].image.digest.hex()}>"
    one.messages[1]["content"] = [{"type": "image", "image": shown}, {"type": "text", "text": "What is it?"}]
    write_trajectories(folder / "trajectories", [one], step=1, split="train", turn_reward_coef=1.0)
    return folder


def test_only_checked_formats_become_pictures(tmp_path: Path) -> None:
    whole = encoded(1)
    svg = b"<svg xmlns='http://www.w3.org/2000/svg' onload='window.hacked=1'/>"
    files = [whole, encoded(2, kind="JPEG"), svg, whole[:9] + svg, b"\xff\xd8\xff" + svg, b"x" * (MOST_BYTES + 1)]
    folder = pictured(tmp_path, *files)
    path = folder / "trajectories" / "train_000001.parquet"
    place = (0, "train_000001", 0)
    record = as_seen(Viewer([open_run(str(folder))]).trajectory(place))
    images = record["transcripts"][0]["images"]
    kinds = [record["pictures"].get(one["digest"], "").partition(";")[0] for one in images]
    assert kinds == ["data:image/png", "data:image/jpeg", "", "", "", ""]
    assert base64.b64decode(record["pictures"][images[0]["digest"]].partition(",")[2]) == whole
    # A digest is no path.
    (folder / "secret").write_bytes(whole)
    row = pq.read_table(path).to_pylist(maps_as_pydicts="strict")[0]
    row["images"][0][0]["digest"] = "../secret"
    pq.write_table(pa.Table.from_pylist([row], schema=SCHEMA), path)
    viewer = Viewer([open_run(str(folder))])
    assert set(as_seen(viewer.trajectory(place))["pictures"]) == {images[1]["digest"]}
    for hidden in ("prompts", "answers"):
        assert "data:image/jpeg" not in str(contents(exported(viewer, [place], Hidden.from_names([hidden], []))))
    assert "data:image/jpeg" in str(contents(exported(viewer, [place], Hidden())))


def test_several_windows_and_images_are_shown(tmp_path: Path) -> None:
    player = Player("two windows", 0, "Q")
    player.says("A")
    trajectory = player.ends(1.0)
    trajectory.transcripts.append(Player("", 0, "again").says("B").window)
    trajectory.transcripts[0].score, trajectory.transcripts[1].trained_to = 0.25, 0
    (tmp_path / "trajectories").mkdir()
    write_trajectories(tmp_path / "trajectories", [trajectory], step=1, split="train", turn_reward_coef=1.0)
    viewer = Viewer([open_run(str(tmp_path))])
    record = as_seen(viewer.trajectory((0, "train_000001", 0)))
    assert [len(one["ids"]) for one in record["transcripts"]] == [len(one.ids) for one in trajectory.transcripts]
    assert [(one["trained_to"], one["score"]) for one in record["transcripts"]] == [(None, 0.25), (0, None)]
    hide(shown := viewer.trajectory((0, "train_000001", 0)), Hidden(left_out=frozenset({"scores"})))
    assert [one["score"] for one in as_seen(shown)["transcripts"]] == [None, None]
