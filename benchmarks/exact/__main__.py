"""Whole trainings of tiny models, computed again in float64 from what the runs recorded.

    python -m benchmarks.exact [--out runs/exact] [--only NAME ...]

Trajectories have one, two or five transcripts, chosen by chance, so a prompt's group has all kinds. After a run its
recorded trajectories and its config alone give each step's advantages, losses, gradient, clip and AdamW step a second
time (`benchmarks/exact/update.py`). A row tells how far losses, norms and final weights of the two are apart, each as a
part of what it is compared with; weights as a part of their whole change. Exits 1 where a case is further apart than
the bounds of its row. Runs that are in the folder are not run again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from agentrl.config import Config
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.train import main as train
from benchmarks.exact.update import Training

Weights = Mapping[str, torch.Tensor]
STEPS, PROMPTS, N = 3, 4, 4
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MEANS = f"{ACTOR}.loss_agg_mode=seq-mean-token-mean"
GAE = ("algorithm=ppo", "critic.optim.lr=1e-3", "critic.loss_agg_mode=seq-mean-token-mean")
KL = (f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.1", f"{ACTOR}.entropy_coeff=0.01")
CASES: dict[str, tuple[str, ...]] = {
    "token mean": (),
    "mean by trajectory, KL and entropy": (MEANS, *KL),
    "sum by trajectory, cooler": (
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum",
        "actor_rollout_ref.rollout.temperature=0.8",
    ),
    "sum by a constant, two epochs": (f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm", f"{ACTOR}.ppo_epochs=2"),
    "mean by transcript": (MEANS, f"{ACTOR}.loss_unit=transcript"),
    "critic": (MEANS, *GAE),
    "adapters": (MEANS, *KL, f"{MODEL}.lora_rank=4", f"{ACTOR}.optim.lr=1e-3"),
    "two ranks": (MEANS, *KL, "trainer.n_gpus_per_node=2"),
    "hybrid": (MEANS, *KL),
}
"""By name, overrides of a run."""
NUMBERS_CLOSE, WEIGHTS_CLOSE = 2e-4, 1e-3
"""Largest differences. Runs compute in float32, and AdamW enlarges the rounding of the smallest gradients."""

LOOP = """
from agentrl.agent_loop import AgentLoop
from agentrl.trajectory import Status


class Sessions(AgentLoop):
    async def run(self, episode):
        for part in range((1, 2, 5)[episode.seed % 3]):
            more = [{"role": "user", "content": f"Part {part}."}] if part else []
            await episode.start([*episode.sample.prompt, *more])
            await episode.generate(max_tokens=4 + 3 * part)
        episode.finish(Status.COMPLETED)
"""
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(solution_str.encode("utf-8", "replace")) % 8 / 8
"""


@dataclass(frozen=True, slots=True)
class Apart:
    """Distances of a run from its second computation, each a part of what it is compared with."""

    numbers: float
    """The largest of any loss and gradient norm of any step."""
    weights: float
    """A part of all weights' change; the larger of policy and critic."""
    transcripts: tuple[int, ...]
    """Numbers of transcripts that trajectories have."""

    @property
    def close(self) -> bool:
        """Say whether rounding explains it."""
        return self.numbers <= NUMBERS_CLOSE and self.weights <= WEIGHTS_CLOSE


def make_policy(folder: Path, name: str) -> Path:
    """Write the policy that a case begins with, and its tokenizer."""
    policy = folder / "starts" / ("hybrid" if name == "hybrid" else "plain")
    if (policy / "config.json").exists():
        return policy
    make_tiny_policy(
        policy, seed=3, shape=TinyShape(vocab=600, hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48)
    )
    if name == "hybrid":  # a linear attention below a full one
        config = AutoConfig.for_model(
            "qwen3_5_text",
            vocab_size=len(AutoTokenizer.from_pretrained(policy)),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            layer_types=["linear_attention", "full_attention"],
            max_position_embeddings=512,
        )
        torch.manual_seed(3)
        AutoModelForCausalLM.from_config(config).save_pretrained(policy)
    return policy


def run_case(folder: Path, name: str) -> Path:
    """Train one case in `folder`, where it is not there yet; returns the run's folder."""
    run = folder / name.replace(",", "").replace(" ", "_")
    if (run / "policy" / "model.safetensors").exists():
        return run
    policy = make_policy(folder, name)
    (folder / "sessions.py").write_text(LOOP)
    (folder / "loops.yaml").write_text(f"- {{name: sessions, _target_: {folder}/sessions.py:Sessions}}\n")
    (folder / "scorer.py").write_text(SCORER)
    rows = [{"prompt": [{"role": "user", "content": f"Say {n}."}], "data_source": "exact"} for n in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "rows.parquet")
    agent = "actor_rollout_ref.rollout.agent"
    words = [
        f"data.train_files={folder}/rows.parquet",
        "data.val_files=null",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=128",
        "data.max_response_length=256",
        f"{MODEL}.path={policy}",
        f"custom_reward_function.path={folder}/scorer.py",
        f"{agent}.agent_loop_config_path={folder}/loops.yaml",
        f"{agent}.default_agent_loop=sessions",
        f"actor_rollout_ref.rollout.n={N}",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_max_token_len_per_gpu=400",
        f"{ACTOR}.shuffle=false",
        f"{ACTOR}.optim.lr=1e-4",
        *([] if "algorithm=ppo" in CASES[name] else ["algorithm.filter_groups.enable=false"]),
        "trainer.device=cpu",
        "trainer.logger=[jsonl]",
        "trainer.save_trajectories=all",
        f"trainer.save_freq={STEPS}",
        f"trainer.total_training_steps={STEPS}",
        "trainer.resume_mode=disable",
        f"trainer.default_local_dir={run}",
        *CASES[name],
    ]
    if status := train(words):
        raise SystemExit(f"{name}: the run ended with status {status}")
    return run


def compare(run: Path) -> Apart:
    """Compute a run again, and compare."""
    tree = yaml.safe_load((run / "config.yaml").read_text())
    config = Config.model_validate({key: value for key, value in tree.items() if key != "every_key"})
    policy = Path(config.actor_rollout_ref.model.path)
    training = Training(run, config, policy)
    before = {name: one.detach().clone() for name, one in training.weights()}
    metrics = {line["step"]: line for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
    numbers = 0.0
    for step in range(1, STEPS + 1):
        for name, again in training.step(step).items():
            numbers = max(numbers, abs(metrics[step][name] - again) / max(abs(again), 1e-3))
    weights = distance(load_file(run / "policy" / "model.safetensors"), dict(training.weights()), before)
    if training.critic is not None:
        (shard,) = (run / "checkpoints" / f"step_{STEPS:06d}" / "critic").glob("*.safetensors")
        saved = {name: one for name, one in load_file(shard).items() if "/" not in name}
        start = Training(run, config, policy).critic
        assert start is not None
        after, first = (
            {name.removeprefix("base."): one for name, one in model.named_parameters()}
            for model in (training.critic, start)
        )
        weights = max(weights, distance(saved, after, first))
    return Apart(numbers, weights, tuple(sorted(training.transcripts)))


@torch.no_grad()
def distance(made: Weights, again: Weights, before: Weights) -> float:
    """Return the norm of the difference of weights, as a part of the norm of their change."""
    moved = sum(float((again[name] - before[name]).square().sum()) for name in made) ** 0.5
    return sum(float((again[name] - made[name]).square().sum()) for name in made) ** 0.5 / moved


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; returns 1 where one is too far apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/exact"), help="folder of the runs")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="some cases")
    options = parser.parse_args(argv)
    folder = options.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    lines, status = ["| run | transcripts of a trajectory | losses, norms | weights |", "|---|---|---|---|"], 0
    for name in options.only:
        found = compare(run_case(folder, name))
        several = ", ".join(map(str, found.transcripts))
        lines.append(f"| {name} | {several} | {found.numbers:.1g} | {found.weights:.1g} |")
        status |= not found.close
    print("\n".join(lines))
    return status


if __name__ == "__main__":
    sys.exit(main())
