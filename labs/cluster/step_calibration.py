"""The step simulator against real steps: this CPU is measured, then steps of other sizes are foretold and run.

    python -m labs.cluster.step_calibration [--assets runs/quickstart-assets] [--steps 3]

For each of two policies (the quickstart's, and a random one of 3.3 million parameters) are measured: the rate of the
matrix products of its sizes, a log-prob pass and an update of one made-up batch, and steps of the embedded engine with
few and many requests and tokens. Then the trainer runs with other batches and lengths, and its stages are compared with
what `step_times.py` and `rollout_times.py` say of the trajectories that it sampled. One thread; CPU-seconds, since the
clock of a shared machine measures its neighbours, too.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from agentrl.config import load_config
from agentrl.config.sections.actor import ActorRolloutRefConfig
from agentrl.config.sections.model import PolicyModelConfig
from agentrl.config.sections.training import Config
from agentrl.engines.contract import SamplingParams
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.model.packed import load_model
from agentrl.observe.open import open_display
from agentrl.plan import rollout_times, sizing
from agentrl.plan.simulated_servers import Session, Speed
from agentrl.plan.sizing import ModelShape
from agentrl.plan.step_times import Cluster, Plan, Training
from agentrl.quickstart.assets import with_quickstart_data, with_quickstart_policy
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.trainer.build import build
from agentrl.trainer.inputs import open_inputs
from agentrl.trainer.step import Trainer
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trajectory.parquet import read_trajectories
from agentrl.workers import PolicyWorker

LARGER = TinyShape(vocab=512, hidden=256, layers=4, heads=8, kv_heads=4, intermediate=768, max_length=2048)
GROUP, PROMPT = 8, 64
BATCHES = ((8, 64), (1, 832))
"""Groups and tokens of an answer of the made-up batches that passes are measured on: short and long ones."""
DECODES = ((4, 64), (4, 512), (48, 64), (48, 512))
"""Requests and tokens of each that the engine's steps are measured with."""
DECODED = 24
"""Tokens of each request."""
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Setting:
    """A run to be foretold."""

    name: str
    prompts: int
    n: int
    response: int
    quickstart: bool
    """The quickstart's policy, tasks and tools; else one turn of a random policy."""


SETTINGS = (
    Setting("random policy, answers up to 96", 16, 4, 96, False),
    Setting("random policy, answers up to 768", 4, 8, 768, False),
    Setting("quickstart with its tools", 16, 8, 256, True),
)


class CountingTrainer(Trainer):
    """Also knows the CPU-seconds of each stage."""

    cpu: dict[str, float]

    @contextmanager
    def timed(self, name: str, *, shown: bool = True) -> Iterator[None]:
        began = time.process_time()
        with super().timed(name, shown=shown):
            yield
        self.cpu[name] = time.process_time() - began


def cpu_seconds(call: Any) -> float:
    """The least of some runs, after one that is not counted."""
    call()
    taken = []
    for _ in range(REPEATS):
        began = time.process_time()
        call()
        taken.append(time.process_time() - began)
    return min(taken)


def matmul_rate(shape: ModelShape, rows: int = 2048) -> float:
    """FLOPs a second of the products of a layer's MLP, which are most of a pass."""
    left, right = torch.randn(rows, shape.hidden), torch.randn(shape.hidden, shape.intermediate)
    out = torch.empty(rows, shape.intermediate)
    seconds = cpu_seconds(lambda: [torch.mm(left, right, out=out) for _ in range(20)])
    return 20 * 2.0 * rows * shape.hidden * shape.intermediate / seconds


def made_up_batch(vocab: int, groups: int, answer: int) -> RaggedBatch:
    """groups x GROUP sequences; those of a group begin alike."""
    generator = torch.Generator().manual_seed(1)
    ids, rows, length = [], groups * GROUP, PROMPT + answer
    for _ in range(groups):
        prompt = torch.randint(3, vocab, (PROMPT,), generator=generator)
        for _ in range(GROUP):
            ids += [prompt, torch.randint(3, vocab, (answer,), generator=generator)]
    mask = (torch.arange(length) >= PROMPT).repeat(rows)
    zeros = torch.zeros(rows * length)
    return RaggedBatch.from_columns(
        offsets=torch.arange(0, rows * length + 1, length),
        ids=torch.cat(ids),
        mask=mask,
        rollout_logprobs=zeros,
        version=mask.int() - 1,
        turn=mask.int() - 1,
        rewards=zeros,
        group=torch.arange(rows) // GROUP,
        trajectory=torch.arange(rows),
        policy=torch.zeros(rows, dtype=torch.int32),
        policies=("policy",),
        old_logprobs=zeros.clone(),
        advantages=torch.randn(rows * length, generator=generator) * mask,
    )


def measured_cluster(policy: Path, shape: ModelShape) -> Cluster:
    """This machine as a cluster of one device: its rate, and what parts of it passes reach.

    A pass over short and one over long sequences tell the time of linear layers and of attention apart.
    """
    roles = ActorRolloutRefConfig(model=PolicyModelConfig(path=str(policy)))
    worker = PolicyWorker(Config(actor_rollout_ref=roles), device="cpu", total_steps=100)
    forwards, updates, by_linear, by_attention = [], [], [], []
    for groups, answer in BATCHES:
        batch = made_up_batch(shape.vocab, groups, answer)
        forwards.append(cpu_seconds(lambda batch=batch: worker.compute_log_probs(batch)))
        updates.append(cpu_seconds(lambda batch=batch: worker.update(batch, step=1)))
        rows = range(groups * GROUP)
        sessions = [Session(f"{row // GROUP}/{row}", row // GROUP, PROMPT, [answer], [], []) for row in rows]
        plan = Plan(prompts=groups, n=GROUP, dtype="float32", recompute=False, share_prompts=True, chunk_logits=1 << 24)
        work, _ = Training(Cluster(gpus_per_node=1), plan, shape).work(sessions)
        attention = sizing.attention_flops(shape, work)
        by_linear.append(sizing.forward_flops(shape, work) - attention)
        by_attention.append(attention)
    terms = torch.tensor([by_linear, by_attention], dtype=torch.float64).T
    (linear, attention), rate = torch.linalg.solve(terms, torch.tensor(updates).double()).tolist(), matmul_rate(shape)
    slower = max(attention / linear, 1.0)
    reached = [(terms[:, 0] + slower * terms[:, 1]) / torch.tensor(seconds) / rate for seconds in (forwards, updates)]
    source = torch.ones(1 << 24)
    copy = cpu_seconds(lambda: source.clone())
    return Cluster(
        gpus_per_node=1,
        flops=rate,
        mfu_forward=float(reached[0].mean()),
        mfu_update=3 * float(reached[1].mean()),
        attention_slower=slower,
        host_copy=source.nbytes / copy,
        pcie=1e15,
    )


def measured_speed(policy: Path) -> Speed:
    """Measure the embedded engine's speed, from the steps of DECODES by least squares, and from its prefills."""
    model = load_model(str(policy))

    def taken(requests: int, tokens: int, sampled: int) -> float:
        return cpu_seconds(lambda: asyncio.run(generate(model, requests, tokens, sampled)))

    rows, seconds, prefills = [], [], []
    for requests, tokens in DECODES:
        one = taken(requests, tokens, 1)
        prefills.append((requests * tokens, one))
        rows.append([1.0, float(requests), requests * (tokens + DECODED / 2)])
        seconds.append((taken(requests, tokens, 1 + DECODED) - one) / DECODED)
    solved = torch.linalg.lstsq(torch.tensor(rows).double(), torch.tensor(seconds).double()[:, None]).solution
    fixed, each, token = solved[:, 0].clamp(min=0.0).tolist()
    (few, fast), (much, slow) = prefills[0], prefills[-1]
    return Speed(
        prefill=(much - few) / (slow - fast),
        prefill_fixed=0.0,
        step_fixed=fixed,
        step_each=each,
        step_token=token,
        max_running=256,
    )


async def generate(model: PreTrainedModel, requests: int, tokens: int, sampled: int) -> None:
    """Sample `sampled` tokens for each of `requests` prompts of `tokens` random ids."""
    engine = EmbeddedEngine(model, max_num_seqs=256, max_model_len=2048)
    params = SamplingParams(sampled)
    prompts = torch.randint(3, model.config.vocab_size, (requests, tokens)).tolist()
    await asyncio.gather(*(engine.generate(ids, params, f"{number}/0") for number, ids in enumerate(prompts)))
    await engine.close()


def run(setting: Setting, policy: Path, assets: Path, folder: Path, steps: int) -> tuple[Path, list[dict[str, float]]]:
    """The run's folder, and the CPU-seconds of each step's stages, after a first step."""
    config = load_config(overrides(setting, policy, assets, folder, steps))
    found = []
    with (
        open_display(setting.name) as display,
        build(config, open_inputs(config), display, CountingTrainer) as run,
    ):
        trainer = run.training
        assert isinstance(trainer, CountingTrainer)
        for _ in range(steps + 1):
            trainer.cpu = {}
            trainer.step += 1
            trainer.train_step()
            found.append(trainer.cpu)
    return folder / "run", found[1:]


def overrides(setting: Setting, policy: Path, assets: Path, folder: Path, steps: int) -> list[str]:
    """The run's command line."""
    rollout = "actor_rollout_ref.rollout"
    common = [
        f"data.train_batch_size={setting.prompts}",
        f"data.max_response_length={setting.response}",
        f"actor_rollout_ref.model.path={policy}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={setting.prompts}",
        f"{rollout}.n={setting.n}",
        "algorithm.filter_groups.enable=false",
        f"trainer.default_local_dir={folder}/run",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.show_trajectory_freq=-1",
    ]
    if setting.quickstart:
        return [
            f"data.train_files={assets}/train.parquet",
            f"{rollout}.multi_turn.tool_config_path={assets}/tools.yaml",
            *common,
        ]
    rows = [
        {
            "data_source": "quickstart/arithmetic",
            "prompt": [{"role": "user", "content": f"Task {number}: " + "add 1 and then 2, " * (5 + number % 7)}],
            "reward_model": {"style": "rule", "ground_truth": "0"},
        }
        for number in range(setting.prompts * (steps + 1))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    return [f"data.train_files={folder}/train.parquet", *common]


def foretold(
    folder: Path, setting: Setting, cluster: Cluster, speed: Speed, shape: ModelShape
) -> list[dict[str, float]]:
    """Simulate the seconds of each step after the first, by stage, from its trajectories."""
    told = []
    for file in sorted((folder / "trajectories").glob("train_*.parquet"))[1:]:
        trajectories = read_trajectories(file)
        prompts = [one.transcripts[0].ids[: one.transcripts[0].prompt_length] for one in trajectories]
        common = common_beginning(prompts)
        plan = Plan(
            prompts=setting.prompts,
            n=setting.n,
            mini_batch=setting.prompts,
            dtype="float32",
            recompute=False,
            share_prompts=True,
            common_tokens=common,
            chunk_logits=1 << 24,
        )
        training = Training(cluster, plan, shape)
        sessions = [session for trajectory in trajectories for session in rollout_times.of_trajectory(trajectory)]
        for session in sessions:
            session.tools = [0.0] * len(session.tools)  # waiting costs no CPU
        rollout = rollout_times.simulate(sessions, 1, speed, concurrent=1024, system=common)
        told.append(
            {
                "rollout": rollout.all,
                "old_log_prob": training.forward("", sessions).seconds,
                "update_actor": training.update("", sessions).seconds,
                "sync_weights": sizing.sync_bytes(shape, dtype=4) / cluster.host_copy,
            }
        )
    return told


def common_beginning(rows: list[list[int]]) -> int:
    """Tokens that all rows begin with."""
    first, last = min(rows), max(rows)
    return next((place for place, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--assets", type=Path, default=Path("runs/quickstart-assets"), help="made if not there")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        work = Path(directory)
        config = Config.model_validate({"quickstart": {"dir": str(given.assets)}, "trainer": {"device": "cpu"}})
        with open_display("quickstart") as display:
            made = with_quickstart_policy(with_quickstart_data(config, display), display)
        ready = Path(made.actor_rollout_ref.model.path)
        policies = {False: make_tiny_policy(work / "larger", 1, shape=LARGER), True: ready}
        lines = ["| run | stage | CPU-seconds, foretold | seen | ratio |", "|---|---|---|---|---|"]
        measured = {}
        for kind, policy in policies.items():
            shape = ModelShape.read(policy)
            cluster, speed = measured[kind] = measured_cluster(policy, shape), measured_speed(policy)
            print(f"{shape.params / 1e6:.2f} million parameters: {cluster.flops / 1e9:.0f} GFLOP/s,", end=" ")
            print(f"log-probs {cluster.mfu_forward:.0%} of it, update {cluster.mfu_update:.0%}", end=" ")
            print(f"attention takes {cluster.attention_slower:.1f} times as long; {speed}", flush=True)
        for number, setting in enumerate(SETTINGS):
            policy, (cluster, speed) = policies[setting.quickstart], measured[setting.quickstart]
            shape = ModelShape.read(policy)
            folder = work / str(number)
            folder.mkdir()
            where, seen = run(setting, policy, given.assets, folder, given.steps)
            told = foretold(where, setting, cluster, speed, shape)
            for stage in told[0]:
                guess, fact = (statistics.median(step[stage] for step in steps) for steps in (told, seen))
                lines.append(f"| {setting.name} | {stage} | {guess:.3f} | {fact:.3f} | {guess / fact:.2f} |")
            print("\n".join(lines[-len(told[0]) :]), flush=True)
    print("\n".join(lines))


if __name__ == "__main__":
    main()
