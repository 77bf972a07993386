"""A task beyond its window, learnt with compaction, with the summary masked, and without compaction.

A tool turns the pages of a book. The answer is the numbers of its first and its last page, and the pages together are
longer than the window of 256 tokens. A tiny policy first sees conversations with summaries, most of which state a wrong
first number. GRPO has to teach it to carry the right one through every summary.

    python -m labs.learning.compaction_pays --seeds 11 12 13 14 15 16 17 18 --out runs/compaction

Each seed has its own policy, warm-up and books. With --out the same command resumes where it was stopped. Printed are
the shares of 128 held-out books that are answered right, sampled once, before and after. `--document PAGE` puts the
table into a page. Exits with 1 where the trained summary brought nothing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from agentrl.agent_loop.compactor import HEADING
from agentrl.observe.open import open_display
from agentrl.observe.tracking import read_metrics
from agentrl.quickstart.assets import WarmUp, sft_config, write_untrained
from agentrl.quickstart.tiny_policy import TinyShape
from agentrl.system.json_value import JSON
from agentrl.train import main as train
from agentrl.trainer.run_sft import train_sft
from benchmarks.marked import replace_text
from benchmarks.training.quickstart_seeds import SAMPLED, number
from data_prep.files import write_parquet, write_text

PAGES, WINDOW = 5, 256
TASK = "Turn all pages. Answer with the first and the last number."
REQUEST = "Sum up."
WORDS = ("snow", "river", "stone", "bread", "night", "apple", "grass", "cloud", "horse", "smoke", "field", "light")
TOOL = {"name": "turn", "description": "Turn a page.", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": TOOL}]
TOOLS_YAML = f"""\
tools:
  - class_name: tools.recorded.RecordedTool
    tool_schema: {json.dumps(TOOLS[0])}
"""
COMPACTED = ((0, 3), (2, 5), (4, 5))
"""Pages that a transcript holds, [first, end): the summaries of the first two carry the first number."""
CONVERSATIONS, TRAIN, HELD_OUT, STEPS = 6400, 512, 128, 30
WRONG = (0.0, 0.2, 0.3, 0.5)
"""Shares of summaries with a wrong number, by quarter of the conversations."""
COMPACTION = "actor_rollout_ref.rollout.multi_turn.compaction"
ARMS: dict[str, list[str]] = {
    "summary trained": [f"{COMPACTION}.threshold=0.7"],
    "summary masked": [f"{COMPACTION}.threshold=0.7", f"{COMPACTION}.train_summary=false"],
    "no compaction": [],
}


def stated(page: int, number: str) -> str:
    """State the number of a page, as the page and its readers do."""
    return f"page {page + 1} of {PAGES}: {number}."


class Book:
    """A book and its words for the tool."""

    def __init__(self, draw: random.Random) -> None:
        self.numbers = [draw.randrange(10) for _ in range(PAGES)]
        self.pages = [
            stated(page, str(number)) + " " + " ".join(draw.choice(WORDS) for _ in range(20))
            for page, number in enumerate(self.numbers)
        ]

    @property
    def answer(self) -> str:
        return f"{self.numbers[0]}{self.numbers[-1]}"

    def row(self) -> dict[str, object]:
        """Make the row that trains on it. The recorded answers to equal calls come one after another."""
        answers = [{"arguments": "{}", "text": page} for page in self.pages]
        return {
            "data_source": "quickstart/book",
            "prompt": [{"role": "user", "content": TASK}],
            "reward_model": {"style": "rule", "ground_truth": self.answer},
            "agent_name": "tool_agent",
            "extra_info": {"tools_kwargs": {TOOL["name"]: {"create_kwargs": {"answers": answers}}}},
        }

    def transcripts(self, draw: random.Random, wrong: float) -> list[list[dict[str, Any]]]:
        """Write the transcripts of a reader whose summaries are wrong with that probability."""
        found, summary = [], ""
        first, last = str(self.numbers[0]), str(self.numbers[-1])
        for begin, end in COMPACTED:
            said: list[dict[str, Any]] = [{"role": "user", "content": TASK + (HEADING + summary if summary else "")}]
            for page in self.pages[begin:end]:
                call = {"type": "function", "function": {"name": TOOL["name"], "arguments": "{}"}}
                said.append({"role": "assistant", "content": "", "tool_calls": [call]})
                said.append({"role": "tool", "content": page})
            if (begin, end) == COMPACTED[-1]:
                said.append(
                    {"role": "assistant", "content": f"{stated(0, first)} {stated(PAGES - 1, last)} #### {first}{last}"}
                )
            else:
                first = str(draw.randrange(10)) if draw.random() < wrong else first
                summary = stated(0, first)
                # The loop asks in place of a turn, which the template then writes as an empty one.
                said.append({"role": "assistant", "content": "", "weight": 0})
                said += [{"role": "user", "content": REQUEST}, {"role": "assistant", "content": summary}]
            found.append(said)
        return found


def make(seed: int, folder: Path) -> None:
    """Write the rows, the tool, and the policy after its warm-up."""
    draw = random.Random(seed)
    for name, count in (("train", TRAIN), ("held_out", HELD_OUT)):
        write_parquet(folder / f"{name}.parquet", [Book(draw).row() for _ in range(count)])
    write_text(folder / "tools.yaml", TOOLS_YAML)
    write_text(folder / "request.txt", REQUEST)
    rows: list[dict[str, object]] = []
    while len(rows) < CONVERSATIONS:
        wrong = WRONG[len(WRONG) * len(rows) // CONVERSATIONS]
        said = Book(draw).transcripts(draw, wrong)
        rows += [{"messages": one, "tools": json.dumps(TOOLS)} for one in said]
    conversations = folder / "conversations.parquet"
    write_parquet(conversations, rows)
    write_untrained(folder / "warm-up" / "untrained", conversations, seed, TinyShape(heads=6, kv_heads=6))
    config = sft_config(conversations, folder / "warm-up", WarmUp(), seed, "cpu")
    with open_display(f"warm-up · seed {seed}") as display:
        train_sft(config, display)


def run(seed: int, arm: str, folder: Path) -> tuple[float, float]:
    """Train one arm of a seed, or go on; return the shares of right answers before and after."""
    out = folder / arm.replace(" ", "-")
    rollout, actor = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
    words = [
        *(f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/held_out.parquet"),
        *(f"data.train_batch_size=16 data.max_prompt_length=40 data.max_response_length={WINDOW - 40}".split()),
        *(f"actor_rollout_ref.model.path={folder}/warm-up/policy", f"{actor}.ppo_mini_batch_size=16"),
        *(f"{actor}.optim.lr=3e-4", f"{actor}.optim.lr_warmup_steps=5", f"{actor}.clip_ratio_high=0.28"),
        *(f"{rollout}.n=8", f"{rollout}.max_model_len={WINDOW}"),
        *(f"{rollout}.multi_turn.tool_config_path={folder}/tools.yaml", "trainer.device=cpu"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=true", f"trainer.test_freq={STEPS}"),
        *("trainer.save_freq=10", "trainer.save_trajectories=none", "trainer.max_actor_ckpt_to_keep=1"),
        *(f"data.seed={seed}", f"trainer.seed={seed}", f"trainer.default_local_dir={out}", *ARMS[arm]),
    ]
    if ARMS[arm]:
        words += [f"{COMPACTION}.prompt_file={folder}/request.txt", f"{COMPACTION}.max_summary_tokens=16"]
    assert train(words) == 0
    shares = [number(line, SAMPLED) for line in read_metrics(out / "metrics.jsonl") if SAMPLED in line]
    return shares[0], shares[-1]


def table(found: Sequence[dict[str, JSON]]) -> str:
    """Write a row for each seed, and the means."""
    lines = ["| seed | " + " | ".join(ARMS) + " |", "|---" * (1 + len(ARMS)) + "|"]
    by_arm: dict[str, list[tuple[float, float]]] = {arm: [] for arm in ARMS}
    for one in found:
        told = []
        for arm, shares in by_arm.items():
            before, after = (float(share) for share in one[arm])  # type: ignore[union-attr, arg-type]
            shares.append((before, after))
            told.append(f"{before * 100:.1f} to {after * 100:.1f} %")
        lines.append(f"| {one['seed']} | " + " | ".join(told) + " |")
    means = [[statistics.mean(side) * 100 for side in zip(*shares, strict=True)] for shares in by_arm.values()]
    lines.append("| mean | " + " | ".join(f"{before:.1f} to {after:.1f} %" for before, after in means) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[11, 12, 13, 14, 15, 16, 17, 18])
    parser.add_argument("--out", type=Path, help="folder in which the runs stay")
    parser.add_argument("--document", type=Path, help="page whose marks `compaction` the table goes between")
    asked = parser.parse_args()
    found: list[dict[str, JSON]] = []
    gains = []
    with nullcontext(asked.out) if asked.out else TemporaryDirectory() as place:
        for seed in asked.seeds:
            folder = Path(place, f"seed-{seed}")
            if not (folder / "warm-up" / "policy" / "config.json").exists():
                make(seed, folder)
            shares = {arm: run(seed, arm, folder) for arm in ARMS}
            found.append({"seed": seed, **{arm: list(ends) for arm, ends in shares.items()}})
            gains.append(shares["summary trained"][1] - shares["summary trained"][0])
    print(table(found))
    if asked.document:
        replace_text(asked.document, "compaction", table(found))
    return 0 if statistics.mean(gains) > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
