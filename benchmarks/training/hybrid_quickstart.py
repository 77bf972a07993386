"""The quickstart with a policy whose first layer has a state: LFM2, a short convolution below a layer of attention.

    python -m benchmarks.training.hybrid_quickstart [--seeds 501 502 503] [--out runs/hybrid] [--steps 30]

Seed S has the data of `quickstart.seed=S`, the quickstart's warm-up, and its recipe (configs/recipe/policy). A seed
whose run is there is not run again; one that was ended is continued.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, Lfm2Config, Lfm2ForCausalLM

from agentrl.config.sections.trainer import QuickstartConfig
from agentrl.observe.open import open_display
from agentrl.observe.tracking import read_metrics
from agentrl.quickstart.assets import WarmUp, make_data, sft_config, write_untrained
from agentrl.quickstart.tiny_policy import TinyShape
from agentrl.trainer.run_sft import train_sft

SAMPLED, GREEDY = "val/success_sampled", "val/success_greedy"


def write_hybrid(folder: Path, seed: int) -> None:
    """Replace the model in a folder by LFM2 with random weights; its tokenizer stays."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = Lfm2Config(
        vocab_size=len(tokenizer),
        hidden_size=192,  # six heads of 32, as the quickstart's policy has them
        intermediate_size=288,
        num_hidden_layers=3,
        layer_types=["conv", "full_attention", "full_attention"],
        num_attention_heads=6,
        num_key_value_heads=6,
        max_position_embeddings=4096,
        block_auto_adjust_ff_dim=False,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype=torch.float32,
    )
    torch.manual_seed(seed)
    Lfm2ForCausalLM(config).save_pretrained(folder)


def warm_up(place: Path, seed: int) -> Path:
    """Make the quickstart's data and the warmed-up policy of a seed; returns the policy's folder."""
    policy = place / "policy"
    if policy.exists():
        return policy
    with open_display(f"hybrid quickstart, seed {seed}") as display:
        make_data(place, QuickstartConfig(dir=str(place), seed=seed), display)
        write_untrained(place / "untrained", place / "sft.parquet", seed, TinyShape())
        write_hybrid(place / "untrained", seed)
        train_sft(sft_config(place / "sft.parquet", place, WarmUp(), seed, "cpu"), display)
    return policy


def train(place: Path, seed: int, policy: Path, steps: int) -> None:
    """Run the recipe. Raises subprocess.CalledProcessError when it fails."""
    words = [
        "recipe/policy=quickstart",
        f"quickstart.dir={place}",
        f"quickstart.seed={seed}",
        f"trainer.seed={seed}",
        f"data.seed={seed}",
        f"actor_rollout_ref.model.path={policy}",
        f"trainer.total_training_steps={steps}",
        f"trainer.default_local_dir={place}/run",
    ]
    subprocess.run([sys.executable, "-m", "agentrl.train", *words], check=True)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[501, 502, 503])
    parser.add_argument("--out", type=Path, default=Path("runs/hybrid"))
    parser.add_argument("--steps", type=int, default=30)
    asked = parser.parse_args(words)
    rows = []
    for seed in asked.seeds:
        place = (asked.out / str(seed)).absolute()
        place.mkdir(parents=True, exist_ok=True)
        train(place, seed, warm_up(place, seed), asked.steps)
        found = [step for step in read_metrics(place / "run" / "metrics.jsonl") if SAMPLED in step]
        rows.append((seed, found[0], found[-1]))
    for seed, first, last in rows:
        print(
            f"seed {seed}: sampled {first[SAMPLED]:.1%} before, {last[SAMPLED]:.1%} after {last['step']:g} steps; "
            f"greedy {first[GREEDY]:.1%}, {last[GREEDY]:.1%}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
