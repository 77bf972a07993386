"""Replays that pages start: one process at a time, who may ask for one, and what its page shows."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from playwright.sync_api import Browser, Page, Route, expect

from agentrl.engines.servers.starter import STARTER
from agentrl.errors import DataError, UserError
from agentrl.train import main as train
from agentrl.trajectory.parquet import read_trajectories, write_trajectories
from agentrl.view import replays as module
from agentrl.view.__main__ import may_replay, parser
from agentrl.view.replays import Replays, Wanted
from agentrl.view.run import Run, open_run
from agentrl.view.viewer import Viewer
from tests.naming import assert_names, naming
from tests.view.made import HOSTILE, Player, as_seen, ids_of, make_run, played
from tests.view.served import BEARER, TOKEN, serving
from tests.view.test_browser import Watched

PLACE = (0, "train_000002", 0)
CELLS = "0/train_000002/0"
STAND_IN = """
import shutil, sys, time
made, out, status, said = sys.argv[1:5]
print(said, flush=True)
if status == "hang":
    time.sleep(600)
if made:
    shutil.copytree(made, out, dirs_exist_ok=True)
sys.exit(int(status))
"""


class StandIn:
    """A child process in the command's place, which says and leaves what it is told to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.made, self.status, self.said = folder, "", "0", "hello"
        self.words: list[list[str]] = []

    def leaves(self, player: Player) -> None:
        trajectory = player.ends(None)
        shutil.rmtree(self.folder, ignore_errors=True)
        write_trajectories(self.folder / "trajectories", [trajectory], step=2, split="train", turn_reward_coef=None)
        self.made = str(self.folder)

    def command(self, words: list[str]) -> list[str]:
        self.words.append(words)
        out = next(word for word in words if word.startswith("--out=")).removeprefix("--out=")
        return [sys.executable, "-c", STAND_IN, self.made, out, self.status, self.said]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    made = StandIn(tmp_path / "made")
    real = module._command

    def command(run: Run, uid: str, wanted: Wanted, out: Path, *, trust: bool) -> list[str]:
        return made.command(real(run, uid, wanted, out, trust=trust))

    monkeypatch.setattr(module, "_command", command)
    return made


@pytest.fixture
def replays(viewer: Viewer) -> Iterator[Replays]:
    made = Replays(viewer)
    yield made
    made.close()


def ended(replays: Replays, number: int, seconds: float = 60) -> dict[str, object]:
    deadline = time.monotonic() + seconds
    while replays.answer(number)["goes_on"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return replays.answer(number)


def again(text: str = "#### 0 é") -> Player:
    """The first trajectory of a step of `make_run`, with another last turn."""
    call = played(2, 0, 0).turns[0].calls[0]
    player = Player("train/2/0/0", 0, "How much is 0 times 0?")
    return player.says('<tool_call>{"k": 0}</tool_call>', call, version=1).hears(call.response).says(text)


def test_what_it_made_is_shown_beside_the_original(viewer: Viewer, replays: Replays, stand_in: StandIn) -> None:
    stand_in.leaves(again())
    same = ended(replays, replays.start(Wanted(PLACE)))
    assert (same["state"], same["differs"], same["said"]) == ("done", False, "hello\n")
    stand_in.leaves(again("#### 1"))
    stand_in.status = "1"
    other = ended(replays, replays.start(Wanted(PLACE, checkpoint=None)))
    assert (other["state"], other["differs"]) == ("done", True)
    place = other["result"]
    assert isinstance(place, tuple) and place[0] == 2, "a number behind those of the runs that are open"
    assert len(as_seen(viewer.overview())["runs"]) == 1
    first, second = as_seen(viewer.side_by_side([PLACE, place], 0))["members"]
    assert "".join(piece["text"] for piece in second["pieces"]).startswith("1")
    assert second["differs"] == first["pieces"][0]["start"]
    with naming(DataError, "run 9"):
        replays.start(Wanted((9, "x", 0)))


def test_the_window_that_was_edited_is_shown(tmp_path: Path, stand_in: StandIn) -> None:
    """What an edit leaves is that context window alone; what is sampled again has all of them."""
    windows = [Player("x", 0, "first").says("A"), Player("x", 0, "second").says("B").hears("why?", "user").says("C")]
    for number, folder, last in ((1, tmp_path / "run", "C"), (2, stand_in.folder, "D")):
        windows[1] = Player("x", 0, "second").says("B").hears("why?", "user").says(last)
        both = windows[0].ends(None)
        both.transcripts = [one.window for one in windows]
        for turn in windows[1].trajectory.turns:
            turn.transcript = 1
        both.turns = [*windows[0].trajectory.turns[:1], *windows[1].trajectory.turns]
        write_trajectories(folder / "trajectories", [both], step=number, split="train", turn_reward_coef=None)
    stand_in.made, stand_in.status = str(stand_in.folder), "1"
    viewer = Viewer([open_run(str(tmp_path / "run"))])
    replays, place = Replays(viewer), (0, "train_000001", 0)
    again = ended(replays, replays.start(Wanted(place)))
    assert again["window"] == 1, "the first that is another"
    for turn in windows[1].trajectory.turns:
        turn.transcript = 0
    stand_in.leaves(windows[1])
    edited = ended(replays, replays.start(Wanted(place, 2, text="why not?")))
    assert edited["window"] == 1
    for answer in (again, edited):
        result = answer["result"]
        assert isinstance(result, tuple)
        first, second = as_seen(viewer.side_by_side([place, result], 1))["members"]
        texts = [one["pieces"][0]["text"].split()[0] for one in (first, second)]
        assert texts == [f"#{ids_of('C')[0]}", f"#{ids_of('D')[0]}"], "without a tokenizer, ids"
        assert (first["turns"], second["turns"]) == (2, 2)
    replays.close()


def test_one_goes_on_at_a_time_until_it_is_cancelled(replays: Replays, stand_in: StandIn) -> None:
    stand_in.status = "hang"
    number = replays.start(Wanted(PLACE))
    with naming(UserError, "train/2/0/0"):
        replays.start(Wanted(PLACE))
    assert replays.answer(number)["state"] == "running"
    pid = replays._one(number)._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == max(module.NICE, os.getpriority(os.PRIO_PROCESS, 0))
    replays.cancel(number)
    assert ended(replays, number)["state"] == "cancelled"
    last = replays.start(Wanted(PLACE))
    pid = replays._one(last)._process.pid
    replays.close()
    assert not Path(f"/proc/{pid}").exists(), "it ends with the viewer"
    assert replays.answer(last)["state"] == "cancelled"


def test_its_own_words_are_the_error_and_few_are_kept(replays: Replays, stand_in: StandIn) -> None:
    stand_in.status, stand_in.said = "2", "x" * 100_000 + "\nerror: want the weights of version 1\nfound none"
    answer = ended(replays, replays.start(Wanted(PLACE)))
    assert (answer["state"], answer["error"]) == ("failed", "want the weights of version 1\nfound none")
    assert len(str(answer["said"])) <= module.MOST_SAID
    stand_in.status, stand_in.said = "1", "Traceback\nValueError: oh"
    answer = ended(replays, replays.start(Wanted(PLACE)))
    assert (answer["state"], answer["error"]) == ("failed", "Traceback\nValueError: oh")


def test_texts_are_never_words_of_the_command(tmp_path: Path, stand_in: StandIn) -> None:
    folder = make_run(tmp_path / "run", 1)
    (folder / "checkpoints" / "step_000001").mkdir(parents=True)
    player = Player("--help; $(touch x)", 0, "?")
    write_trajectories(
        folder / "trajectories", [player.says("a").hears("b").ends(1.0)], step=1, split="train", turn_reward_coef=None
    )
    replays = Replays(Viewer([open_run(str(folder))]))
    place = (0, "train_000001", 0)
    for name in ("../../etc", "step_000002", "/etc"):
        with naming(DataError, "no checkpoint"):
            replays.start(Wanted(place, checkpoint=name))
    with naming(DataError, "at most"):
        replays.start(Wanted(place, 1, text="x" * (module.MOST_TEXT + 1)))
    text = "--out=/etc $(touch y)\ud800\r\n"
    ended(replays, replays.start(Wanted(place, 1, text=text, checkpoint="step_000001")))
    (words,) = stand_in.words
    assert words[3] == str(folder) and words[4] == "--uid=--help; $(touch x)" and "--device=cpu" in words
    assert f"--checkpoint={folder}/checkpoints/step_000001" in words
    assert not any("touch y" in word for word in words)
    (file,) = [word.removeprefix("--tool-answer=") for word in words if word.startswith("--tool-answer=")]
    assert Path(file).read_bytes().decode() == "--out=/etc $(touch y)\ufffd\r\n"
    replays.close()
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("words", "may"),
    [
        ([], True),
        (["--no-replay"], False),
        (["--host", "0.0.0.0"], False),
        (["--host", "0.0.0.0", "--replay"], True),
        (["--host", "::1"], True),
    ],
)
def test_other_machines_may_not_unless_it_is_said(words: list[str], may: bool) -> None:
    assert may_replay(parser().parse_args(["run", *words])) == may


def test_the_command_trusts_a_run_only_where_the_viewer_was_told_to(viewer: Viewer, stand_in: StandIn) -> None:
    for words in ([], ["--trust"]):
        made = Replays(viewer, trust=parser().parse_args(["run", *words]).trust)
        ended(made, made.start(Wanted(PLACE)))
        made.close()
    assert [[word for word in words if word == "--trust"] for words in stand_in.words] == [[], ["--trust"]]


def test_only_the_viewers_own_pages_start_one(run: Path, stand_in: StandIn) -> None:
    stand_in.leaves(again())
    body = {"place": CELLS}
    with serving(run, replay=True) as address, httpx.Client(base_url=address) as client:
        for headers in ({}, {"Origin": address}, {"Cookie": TOKEN}, {"Authorization": TOKEN}):
            answer = client.post("/api/replay", json=body, headers=headers)
            assert (answer.status_code, stand_in.words) == (403, []), headers
        client.headers.update(BEARER)
        assert client.get("/api/replay").status_code == 405
        number = client.post("/api/replay", json=body).json()["number"]
        assert client.post(f"/api/replay/{number}/cancel", headers={"Authorization": ""}).status_code == 403
        assert client.get(f"/api/replay/{number}").json()["uid"] == "train/2/0/0"
        assert_names(client.get("/api/replay/7").json()["error"], "7")
    with serving(run) as address, httpx.Client(base_url=address, headers=BEARER) as client:
        assert client.post("/api/replay", json=body).status_code in (404, 405)
        assert 'data-replay="no"' in client.get("/").text


def test_the_command_ends_with_the_process_that_started_it(run: Path) -> None:
    """Also where that one is killed: the pipe to it is closed then."""
    child = subprocess.Popen(
        [sys.executable, "-m", "agentrl.replay", str(run), "--uid=train/2/0/0"],
        env={**os.environ, STARTER: str(os.getpid())},
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdin is not None
    child.stdin.close()
    assert child.wait(60) == -signal.SIGKILL


def fits(page: Page) -> None:
    """No page is wider than the window, in either theme."""
    for width, scheme in ((360, "dark"), (1600, "light"), (1280, "light")):
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0, width
        ground = page.evaluate("getComputedStyle(document.querySelector('dialog, body')).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground)[:3])) > 380) == (scheme == "light")


def test_from_a_trajectory_to_its_replay_and_to_an_edit(browser: Browser, run: Path, stand_in: StandIn) -> None:
    stand_in.leaves(again())
    with serving(run, replay=True) as address:
        watched = Watched(browser)
        page = watched.open(address, "/run/0/trajectory/train_000002/0")
        expect(page.locator("h1")).to_have_text("train/2/0/0")
        page.keyboard.press("r")
        expect(page.locator("dialog")).to_contain_text("No tool is called")
        page.keyboard.press("Enter")
        expect(page.locator(".verdict")).to_have_text("Every token was sampled again.")
        expect(page.locator(".member")).to_have_count(0)
        expect(page.locator(".said")).to_have_text("hello\n")
        page.get_by_role("link", name="The other one").click()
        expect(page.locator(".call")).to_contain_text("calculator")
        expect(page.get_by_role("button", name="Replay")).to_have_count(0)
        # Another answer, which attacks the page; so does what the command says.
        stand_in.leaves(again(HOSTILE[1]))
        stand_in.said = "\n".join(HOSTILE).replace("\x00", "")
        page.goto(f"{address}/#/run/0/trajectory/train_000002/0")
        page.get_by_role("button", name="Edit and continue").click()
        box = page.get_by_label("the other text")
        expect(box).to_have_value("0")
        expect(page.locator("dialog")).to_contain_text("names no tools")
        fits(page)
        box.fill(HOSTILE[0])
        page.keyboard.press("Control+Enter")
        expect(page.locator(".verdict")).to_have_text("It went on from the other text.")
        expect(page.locator("h1")).to_contain_text("turn 1 edited")
        expect(page.locator(".divergence")).to_have_count(1)
        expect(page.locator(".member").nth(1)).to_contain_text(HOSTILE[1])
        assert page.evaluate("window.hacked") is None
        fits(page)
        assert page.locator("main script, main iframe, main img, main svg").count() == 0
        assert {"--turn=1", "--call=0"} <= set(stand_in.words[-1])
        page.reload()
        expect(page.locator(".verdict")).to_be_visible()
        # The command's own sentence, and a cancelled one.
        stand_in.status, stand_in.said, stand_in.made = "2", "error: <b>no</b> weights", ""
        page.goto(f"{address}/#/run/0/trajectory/train_000002/0")
        page.get_by_role("button", name="Replay").click()
        page.locator("dialog .primary").click()
        expect(page.locator(".problems")).to_have_text("<b>no</b> weights")
        stand_in.status = "hang"
        page.goto(f"{address}/#/run/0/trajectory/train_000002/0")
        page.get_by_role("button", name="Replay").click()
        page.locator("dialog .primary").click()
        expect(page.locator(".status")).to_have_text("running")  # by now the page of it: the dialog has a Cancel, too
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator(".status")).to_have_text("cancelled")
        expect(page.get_by_role("button", name="Cancel")).to_be_hidden()
        # One that is cancelled before the server has said its number.
        page.goto(f"{address}/#/run/0/trajectory/train_000002/0")
        held: list[Route] = []
        page.route("**/api/replay", lambda route: held.append(route), times=1)
        page.get_by_role("button", name="Replay").click()
        with page.expect_request("**/api/replay"):
            page.locator("dialog .primary").click()
        page.get_by_role("button", name="Cancel").click()
        expect(page.locator("dialog")).to_have_count(0)
        with page.expect_response("**/api/replay/*/cancel") as cancelled:
            held.pop().continue_()
        assert cancelled.value.json()["state"] == "cancelled"
        expect(page.locator("h1")).to_have_text("train/2/0/0")
        assert watched.said == []
        watched.context.close()


@pytest.mark.slice(0, "long run")
def test_the_command_itself_is_asked(
    small_run: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a run of two steps, of which the last weights are kept: of the second step those that sampled it are not."""
    monkeypatch.setattr(module, "NICE", 0)
    run = tmp_path / "run"
    more = ["data.max_response_length=96", "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn=8"]
    more += ["data.val_files=null", "trainer.total_training_steps=2", "trainer.save_freq=-1"]
    assert train(small_run(*more)) == 0
    path = run / "trajectories" / "train_000001.parquet"
    table = pq.read_table(path)
    row = table.slice(0, 1).to_pylist(maps_as_pydicts="strict")[0]
    last = row["turns"][-1]  # tiny policies seldom call a tool
    row["turns"].append({**last, "role": "tool", "text": "7", "start": last["end"], "end": last["end"], "seed": None})
    pq.write_table(pa.Table.from_pylist([row], schema=table.schema), path)
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()}
    viewer = Viewer([open_run(str(run))])
    replays = Replays(viewer, trust=True)
    same = ended(replays, replays.start(Wanted((0, "train_000001", 0))), 600)
    assert (same["state"], same["differs"]) == ("done", False), same["said"]
    assert replays.options(0)["checkpoints"] == ["step_000002"]
    wanted = Wanted((0, "train_000001", 0), len(row["turns"]) - 1, text="forty-two", checkpoint="step_000002")
    edited = ended(replays, replays.start(wanted), 600)
    assert edited["state"] == "done" and "forty-two" in str(edited["said"])
    assert isinstance(edited["result"], tuple)
    folder = Path(viewer.run(edited["result"][0]).folder.path) / "trajectories"
    (made,) = read_trajectories(folder / "train_000001.parquet")
    assert made.turns[-1].role == "assistant" and made.transcripts[0].versions[-1].version == 2
    refused = ended(replays, replays.start(Wanted((0, "train_000002", 0))), 600)
    assert refused["state"] == "failed"
    assert_names(str(refused["error"]), "version 1", "found step_000002")
    replays.close()
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*") if file.is_file()} == before
