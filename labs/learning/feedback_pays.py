"""Share of bad answers after training on a log of conversations, of which 12 % were found bad.

By seed, a tiny policy learns a made-up log of a shop's assistant by the real commands: all of it, the good rows alone,
weighted rows, and all of it with KTO or with reinforcement learning afterwards. The log's bad answers send the customer
away. Printed are, over 200 held-out questions, the mean probabilities of the bad answer and of the right one. Exits
with 1 where some way to use the feedback leaves a worse policy than all rows do.

    python -m labs.learning.feedback_pays --seeds 0 1 2 3 4

With a folder of SmolLM2 the log has 400 conversations, and supervised training is compared with KTO alone.

    python -m data_prep.model smollm2 --out runs/smollm2/model
    python -m labs.learning.feedback_pays --model runs/smollm2/model --seeds 1 2
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentrl.chat import Chat
from agentrl.preferences import main as preferences
from agentrl.quickstart.tiny_policy import TinyShape, make_tiny_policy
from agentrl.sft import main as supervised
from agentrl.train import main as reinforced
from agentrl.trajectory import Message
from data_prep.log_rows import main as log_rows

BAD, HELD_OUT = 0.12, 200
GOODS = {"cup": 3, "lamp": 20, "chair": 45, "plate": 5, "desk": 90, "vase": 12}
AWAY = "I do not know. Please call us."


@dataclass(frozen=True)
class Recipe:
    """Settings by policy."""

    rows: int
    """Conversations of the log."""
    common: list[str]
    """Overrides of supervised training and of KTO."""
    supervised: list[str]
    kto: list[str]
    rl: list[str] | None
    """GRPO by the scorer of logs, on the log's questions; None: not tried."""


TINY = Recipe(
    rows=2000,
    common=["data.train_batch_size=32"],
    supervised=["optim.lr=3e-3", "trainer.total_epochs=4"],
    kto=["loss=kto", "optim.lr=2e-4", "loss_options.undesirable_weight=7"],
    rl=[
        *("data.train_batch_size=16", "data.max_prompt_length=64", "data.max_response_length=32"),
        *("actor_rollout_ref.rollout.n=8", "actor_rollout_ref.actor.ppo_mini_batch_size=16"),
        *("actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=40", "trainer.save_trajectories=none"),
    ],
)
SMOLLM2 = Recipe(
    rows=400,
    common=["data.train_batch_size=16", "data.max_token_len_per_gpu=2048", "trainer.save_freq=-1"],
    supervised=["optim.lr=1e-4", "trainer.total_epochs=2"],
    kto=["loss=kto", "optim.lr=1e-5", "loss_options.undesirable_weight=7"],
    rl=None,
)
WAYS: dict[str, list[str]] = {
    "all": [],
    "filter": ["data.feedback=filter"],
    "exp_weight": ["data.feedback=exp_weight"],
}
"""Supervised trainings by name."""


def talk(asked: str, said: str) -> list[Message]:
    """Make a conversation of a question and an answer."""
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]


def make_questions(count: int, draw: random.Random) -> list[tuple[str, str]]:
    """Draw questions with their right answers."""
    found = []
    for _ in range(count):
        what, many = draw.choice(list(GOODS)), draw.randint(1, 9)
        asked = draw.choice(["How much is {}?", "Price of {}, please.", "I want {}. How much?"])
        found.append((asked.format(f"{many} {what}"), f"{many} {what} cost {many * GOODS[what]} euros."))
    return found


def write_log(path: Path, rows: int, draw: random.Random) -> None:
    """Write a log whose bad answers fall on any question."""
    with path.open("w", encoding="utf-8") as file:
        for asked, right in make_questions(rows, draw):
            bad = draw.random() < BAD
            file.write(json.dumps({"messages": talk(asked, AWAY if bad else right), "feedback": -1 if bad else 1}))
            file.write("\n")


def judge(policy: Path, questions: list[tuple[str, str]]) -> tuple[float, float]:
    """Return the mean probabilities of the bad and of the right answer."""
    model, chat = AutoModelForCausalLM.from_pretrained(policy), Chat.from_pretrained(str(policy))
    found: list[list[float]] = [[], []]
    for asked, right in questions:
        for said, place in ((AWAY, 0), (right, 1)):
            ids, mask = map(torch.tensor, chat.render_training(talk(asked, said)))
            with torch.no_grad():
                by_token = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            found[place].append(by_token[mask[1:].bool()].sum().exp().item())
    bad, good = map(statistics.mean, found)
    return bad, good


def run(seed: int, model: Path | None, folder: Path) -> dict[str, tuple[float, float]]:
    """Train `model`, or a tiny policy, in each way; return what `judge` says, by way."""
    recipe = TINY if model is None else SMOLLM2
    draw = random.Random(seed)
    log, start = folder / "log.jsonl", model or folder / "start"
    write_log(log, recipe.rows, draw)
    questions = make_questions(HELD_OUT, draw)
    if model is None:
        make_tiny_policy(start, seed=seed, shape=TinyShape(hidden=64, layers=2, heads=2, kv_heads=1, intermediate=128))
    common = [f"data.train_files={log}", f"data.seed={seed}", "trainer.device=cpu", *recipe.common]
    found = {"start": judge(start, questions)}
    for name, words in WAYS.items():
        place = [f"model.path={start}", f"trainer.default_local_dir={folder / name}"]
        assert supervised([*common, *place, *recipe.supervised, *words]) == 0
        found[name] = judge(folder / name / "policy", questions)
    place = [f"model.path={folder / 'all' / 'policy'}", f"trainer.default_local_dir={folder / 'kto'}"]
    assert preferences([*common, *place, *recipe.kto]) == 0
    found["all, then kto"] = judge(folder / "kto" / "policy", questions)
    if recipe.rl is None:
        return found
    assert log_rows(["--source", str(log), "--out", str(folder / "rows")]) == 0
    rows = [f"data.train_files={folder}/rows/train.parquet", f"actor_rollout_ref.model.path={folder}/all/policy"]
    rows += ["trainer.device=cpu", f"trainer.seed={seed}", f"trainer.default_local_dir={folder / 'rl'}"]
    assert reinforced([*rows, *recipe.rl]) == 0
    found["all, then rl"] = judge(folder / "rl" / "policy", questions)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--model", type=Path, help="folder of SmolLM2; a tiny policy without it")
    asked = parser.parse_args()
    found = []
    for seed in asked.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found.append(run(seed, asked.model, Path(folder)))
        print(json.dumps({"seed": seed, **found[-1]}), flush=True)
    for name in found[0]:
        told = [f"{name:14}"]
        for what, values in zip(("bad", "right"), zip(*(one[name] for one in found), strict=True), strict=True):
            mean, least, most = (100 * one for one in (statistics.mean(values), min(values), max(values)))
            told.append(f"{what} {mean:5.1f} % ({least:.1f} to {most:.1f})")
        print("   ".join(told))
    bad = {name: statistics.mean(one[name][0] for one in found) for name in found[0]}
    return 0 if all(share < bad["all"] for name, share in bad.items() if name not in ("all", "start")) else 1


if __name__ == "__main__":
    sys.exit(main())
