"""Places for sessions in a real schedule, over the embedded engine: which session a batch takes, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pyarrow
import pyarrow.parquet as pq
import pytest

from agentrl.config import Config
from agentrl.config.load import load_config
from agentrl.serve.loop import LiveLoop
from agentrl.serve.options import LiveOptions
from agentrl.serve.store import STORE_FILE, Fate, Store
from tests.rollouts.test_async_source import B, Bench, Opened, opened
from tests.serve.served import KEYS, free_port
from tests.waiting import wait_for

__all__ = ["opened"]  # a fixture
OPTIONS = LiveOptions(
    port=free_port(), client_key=KEYS["CLIENT_KEY"], operator_key=KEYS["OPERATOR_KEY"], idle_seconds=0.0
)
HTTP = httpx.Client(timeout=60)


@pytest.fixture
def config(policy_dir: Path, tmp_path: Path) -> Config:
    rows = [{"prompt": [{"role": "user", "content": f"Place {n}"}], "data_source": "x"} for n in range(B)]
    pq.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    return load_config(
        [
            f"data.train_files={tmp_path}/rows.parquet",
            "data.val_files=null",
            f"data.train_batch_size={B}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={B}",
            "data.max_prompt_length=100",
            "data.max_response_length=8",
            f"actor_rollout_ref.model.path={policy_dir}",
            "actor_rollout_ref.rollout.n=1",
            "algorithm.adv_estimator=reinforce_plus_plus",
            "async_training.max_staleness=1",
            "trainer.save_freq=50",
            "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
            "actor_rollout_ref.rollout.agent.default_agent_loop=overlapped",
            f"trainer.default_local_dir={tmp_path}/run",
        ]
    )


def post(path: str, key: str, **body: object) -> httpx.Response:
    """Post, as soon as the server is there."""
    found: list[httpx.Response] = []

    def posted() -> bool:
        try:
            headers = {"authorization": f"Bearer {KEYS[key]}"}
            found.append(HTTP.post(f"http://127.0.0.1:{OPTIONS.port}/v1/{path}", json=body, headers=headers))
        except httpx.TransportError:
            return False
        return True

    wait_for(posted)
    assert found[0].status_code == 200, found[0].text
    return found[0]


def talk(names: Sequence[str], *, unjudged: Sequence[str] = (), then: Sequence[str] = ()) -> None:
    """Have a session of each name: of the `unjudged` without feedback, of the others with it; judge others `then`."""
    for name in (*unjudged, *names):
        messages = [{"role": "user", "content": f"I am {name}"}]
        post("chat/completions", "CLIENT_KEY", model="policy", messages=messages, metadata={"session_id": name})
        if name not in unjudged:
            judge(name)
    for name in then:
        judge(name)


def judge(name: str) -> None:
    post("feedback", "OPERATOR_KEY", session=name, value=1)


def step(bench: Bench, number: int, people: Callable[[], object]) -> None:
    """Take a step, for which people bring sessions."""
    thread = threading.Thread(target=people)
    thread.start()
    bench.step(number)
    thread.join()


def names(start: str, count: int) -> list[str]:
    return [f"{start}{number}" for number in range(count)]


def fates(tmp_path: Path) -> dict[str, object]:
    """The prompt or the fate of each session."""
    store = Store(tmp_path / "run" / STORE_FILE)
    found: dict[str, object] = {one.id: one.prompt if one.fate is None else one.fate for one in store.sessions()}
    store.close()
    return found


def test_the_engine_is_held_for_an_update_also_where_every_place_is_taken(opened: Opened) -> None:
    with opened(1, 1, loop=LiveLoop(OPTIONS), steps=2) as bench:
        found: list[tuple[bool, bool]] = []

        def until() -> bool:
            """Look before the update's end."""
            held = bench.rollouts.loop.run(bench.rollouts.engine.health()).paused
            found.append((held, bench.source.schedule.is_open))
            return True

        step(bench, 1, lambda: talk([], unjudged=names("s", 2 * B), then=names("s", 2 * B)))
        wait_for(lambda: not bench.source.schedule.is_open)
        bench.until = until
        bench.step(2)
    assert found == [(True, False)]
    assert bench.staleness() == [[0], [1]]


def test_a_session_that_waits_over_a_restart_is_as_old_as_the_bound_allows(opened: Opened, tmp_path: Path) -> None:
    """Its place begins later than its tokens were sampled: places of a new process begin by the present version."""
    with opened(1, 1, loop=LiveLoop(OPTIONS)) as bench:
        step(bench, 1, lambda: talk(names("s", B), unjudged=["waits", "too-late"]))
        state = {"step": 1, "version": 1, **bench.source.state()}
        bench.source.saved()
    with opened(1, 1, loop=LiveLoop(OPTIONS)) as resumed:
        resumed.goes_on(state, 1)
        step(resumed, 2, lambda: talk(names("t", B - 1), then=["waits"]))
        step(resumed, 3, lambda: talk(names("u", B - 1), then=["too-late", "u9"], unjudged=["u9"]))
        assert resumed.staleness(1) == [[0, 1], [0]]
    found = fates(tmp_path)
    assert found["too-late"] is Fate.TOO_OLD
    places = [found[name] for name in ("waits", *names("s", B), *names("t", B - 1), *names("u", B - 1), "u9")]
    assert sorted(places, key=str) == sorted(range(3 * B), key=str), "each of them has one place"


def test_sessions_of_weights_that_no_checkpoint_has_end(opened: Opened, tmp_path: Path) -> None:
    """The run goes back to its start, in the folder where its store is."""
    with opened(1, 1, loop=LiveLoop(OPTIONS)) as bench:
        step(bench, 1, lambda: talk(names("s", B)))
        step(bench, 2, lambda: talk(names("t", B)))
    with opened(1, 1, loop=LiveLoop(OPTIONS)) as again:
        step(again, 1, lambda: None)
        step(again, 2, lambda: talk(names("u", B)))
    found = fates(tmp_path)
    first = {found[name] for name in names("s", B)}
    assert first == set(range(B)), "their prompts are given the same sessions again"
    assert {found[name] for name in names("t", B)} == {Fate.OTHER_WEIGHTS}
    assert {found[name] for name in names("u", B)} == set(range(B, 2 * B))


def test_people_may_take_longer_than_any_deadline(opened: Opened, config: Config) -> None:
    agent = config.actor_rollout_ref.rollout.agent
    assert agent.trajectory_timeout == 600.0
    with opened(1, 1, loop=LiveLoop(OPTIONS), steps=1) as bench:
        scheduler = bench.rollouts.scheduler
        scheduler.trajectory_timeout = 1e-6
        seen: list[dict[str, int]] = []

        def people() -> None:
            wait_for(lambda: len(scheduler.running) == B)
            seen.append(scheduler.waiting_for())
            talk(names("s", B))

        step(bench, 1, people)
        assert seen == [{}], "a silence of people is not told as a stall"
        assert bench.scores[0].count(None) == 0


def test_a_session_whose_tokens_were_deleted_is_not_given_again(opened: Opened, tmp_path: Path) -> None:
    """The run goes back to its start, of which no checkpoint was kept."""
    with opened(1, 1, loop=LiveLoop(OPTIONS)) as bench:
        step(bench, 1, lambda: talk(names("s", B)))
    store = Store(tmp_path / "run" / STORE_FILE)
    store.forget(range(B))
    store.close()
    with opened(1, 1, loop=LiveLoop(OPTIONS)) as again:
        step(again, 1, lambda: talk(names("t", B)))
    found = fates(tmp_path)
    assert {found[name] for name in names("s", B)} == {Fate.DELETED}
    assert {found[name] for name in names("t", B)} == set(range(B))
