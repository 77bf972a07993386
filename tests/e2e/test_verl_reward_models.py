"""verl's commands with a reward model: one that scores alone, and one that the user's function asks."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.test_verl_commands import row
from tests.e2e.verl_command import ACTOR, ROLLOUT
from tests.forked import forked
from tests.reward.tiny_reward_model import make_reward_model

ASKING = """
import aiohttp


async def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict, reward_router_address: str,
    reward_model_tokenizer,
):
    ids = reward_model_tokenizer.encode(solution_str)
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
        payload = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8}}
        async with session.post(f"http://{reward_router_address}/generate", json=payload) as response:
            output = await response.json(content_type=None)
    return {"score": len(output.get("output_ids", [])) % 7 / 7, "length": len(ids)}
"""


@contextmanager
def reward_server(broken: int) -> Iterator[tuple[str, list[Any]]]:
    """A server that answers as many ids as it was sent and one more, `broken` requests at first with an error."""
    asked: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": []})

        def do_POST(self) -> None:
            asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if len(asked) <= broken:
                self.answer(500, {"error": "no memory"})
            else:
                self.answer(200, {"output_ids": [*asked[-1]["input_ids"], 0]})

        def answer(self, status: int, value: object) -> None:
            body = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *said: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def steps_of(words: list[str], policy: Path, folder: Path) -> list[dict[str, float]]:
    """Run two steps of `python -m agentrl.verl.main_ppo` in the folder; the lines of its metrics."""
    rows = [{**row(index), "agent_name": "single_turn", "extra_info": {"index": index}} for index in range(8)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    arguments = [
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=4",
        "data.train_files=train.parquet",
        "data.val_files=train.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=400",
        "data.max_response_length=40",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.optim.lr=1e-3",
        f"actor_rollout_ref.model.path={policy}",
        f"{ROLLOUT}.name=embedded",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=console",
        "trainer.save_freq=-1",
        "trainer.val_before_train=False",
        "trainer.test_freq=-1",
        "trainer.total_training_steps=2",
        "trainer.default_local_dir=run",
        *words,
    ]
    done = forked(["-m", "agentrl.verl.main_ppo", *arguments], folder)
    assert done.returncode == 0, done.stderr + done.stdout
    lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "actor/grad_norm" in line]


def test_a_reward_model_that_is_enabled_scores_alone(policy_dir: Path, tmp_path: Path) -> None:
    model = make_reward_model(tmp_path / "rm")
    words = ["reward_model.enable=True", f"reward_model.model.path={model}", "trainer.rollout_data_dir=texts"]
    first, second = steps_of(words, policy_dir, tmp_path)
    for line in (first, second):
        assert line["score/mean"] == 0, "no scorer is asked, GSM8K's neither"
        assert line["reward/mean"] == pytest.approx(line["score/reward_model"]) and line["reward/mean"] != 0
        assert line["critic/rewards/mean"] == line["reward/mean"], "verl's name"
        assert line["actor/grad_norm"] > 0
    texts = [json.loads(line) for line in (tmp_path / "texts" / "2.jsonl").read_text().splitlines()]
    assert len(texts) == 16 and all({"input", "output", "gts", "score", "step"} <= one.keys() for one in texts)
    assert sum(one["score"] for one in texts) / 16 == pytest.approx(second["reward/mean"]), "verl's score is the reward"
    assert {one["gts"] for one in texts} <= {row(index)["reward_model"]["ground_truth"] for index in range(8)}


def test_a_function_asks_the_reward_model_and_sees_none_of_its_faults(policy_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "grm.py").write_text(ASKING)
    with reward_server(broken=5) as (url, asked):
        words = [
            "reward_model.enable=True",
            f"reward_model.model.path={policy_dir}",
            f"reward_model.rollout.server_urls={url}",
            "custom_reward_function.path=grm.py",
        ]
        first, second = steps_of(words, policy_dir, tmp_path)
    assert first["reward_model/retries"] == 5 and second["reward_model/retries"] == 0
    written = pq.read_table(
        tmp_path / "run" / "trajectories" / "train_000002.parquet", columns=["score", "score_extra"]
    )
    rows = written.to_pylist(maps_as_pydicts="strict")
    assert [one["score"] for one in rows] == [(one["score_extra"]["length"] + 1) % 7 / 7 for one in rows]
    assert len({one["score"] for one in rows}) > 1 and second["score/mean"] > 0
    assert {len(one["input_ids"]) for one in asked} >= {one["score_extra"]["length"] for one in rows}
    assert first["actor/grad_norm"] > 0
