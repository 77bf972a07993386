"""A tiny policy that answers any puzzle with a number at random: `python -m examples.reasoning_gym.guesses DIR`.

Reads DIR/rows/train.parquet, and writes DIR/sft.parquet and DIR/policy. What is left to be learnt is which number.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from itertools import cycle, islice
from pathlib import Path
from random import Random

import pyarrow.parquet as pq

from agentrl.errors import UserError
from agentrl.observe.open import open_display
from agentrl.quickstart.assets import WarmUp, sft_config, write_untrained
from agentrl.quickstart.tiny_policy import TinyShape
from agentrl.system.visible import complain
from agentrl.trainer.run_sft import train_sft
from data_prep.files import write_parquet

SEED = 1
NUMBERS = range(10)


def make(folder: Path, conversations: int) -> None:
    """Write the warm-up's conversations and the policy. Raises UserError."""
    prompts = pq.read_table(folder / "rows" / "train.parquet").column("prompt").to_pylist()
    rng = Random(SEED)
    answers = (f"<answer>{rng.choice(NUMBERS)}</answer>" for _ in range(conversations))
    said = zip(islice(cycle(prompts), conversations), answers, strict=True)
    rows = [{"messages": [*prompt, {"role": "assistant", "content": text}], "tools": "[]"} for prompt, text in said]
    write_parquet(folder / "sft.parquet", rows)
    warm_up = folder / "warm-up"
    shutil.rmtree(warm_up, ignore_errors=True)
    write_untrained(warm_up / "untrained", folder / "sft.parquet", SEED, TinyShape())
    with open_display("warm-up · reasoning_gym") as display:
        train_sft(sft_config(folder / "sft.parquet", warm_up, WarmUp(), SEED, "cpu"), display)
    shutil.rmtree(folder / "policy", ignore_errors=True)
    (warm_up / "policy").rename(folder / "policy")


def main() -> int:
    """Make the policy and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with rows/train.parquet of data_prep.environment")
    parser.add_argument("--conversations", type=int, default=1280, help="of the warm-up")
    given = parser.parse_args()
    try:
        make(given.folder, given.conversations)
    except UserError as error:
        return complain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
