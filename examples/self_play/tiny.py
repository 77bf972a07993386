"""Tiny self-play: rows of Nim, and a tiny policy warmed up on games whose moves are drawn at random.

python -m examples.self_play.tiny --out runs/tiny-self-play
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from random import Random

from agentrl.errors import UserError
from agentrl.observe.open import open_display
from agentrl.quickstart.assets import WarmUp, sft_config, write_untrained
from agentrl.quickstart.tiny_policy import TinyShape
from agentrl.system.visible import complain
from agentrl.trainer.run_sft import train_sft
from agentrl.trajectory import Message
from data_prep.environment import main as write_rows
from data_prep.files import Row, write_parquet
from examples.self_play.nim import PROMPT

LOOPS = Path(__file__).with_name("environments.yaml")
LARGEST = 10
"""Sticks of the largest heap that the warm-up shows."""


def conversation(rng: Random) -> Row:
    """Make one player's part of a game in which both players draw legal moves."""
    left = rng.randint(2, LARGEST)
    messages: list[Message] = [{"role": "user", "content": f"{PROMPT}\n\n{left} sticks"}]
    while True:
        move = rng.randint(1, min(3, left))
        messages.append({"role": "assistant", "content": str(move)})
        left -= move
        left -= rng.randint(1, min(3, left)) if left else 0
        if left == 0:
            return {"messages": messages, "tools": "[]"}
        messages.append({"role": "user", "content": f"{left} sticks"})


def make(out: Path, seed: int, conversations: int) -> int:
    """Write rows and policy; return the exit status."""
    rng = Random(f"warm-up {seed}")
    write_parquet(out / "sft.parquet", [conversation(rng) for _ in range(conversations)])
    warm_up = out / "warm-up"
    shutil.rmtree(warm_up, ignore_errors=True)
    write_untrained(warm_up / "untrained", out / "sft.parquet", seed, TinyShape())
    with open_display("warm-up · self-play") as display:
        train_sft(sft_config(out / "sft.parquet", warm_up, WarmUp(), seed, "cpu"), display)
    shutil.rmtree(out / "policy", ignore_errors=True)
    (warm_up / "policy").rename(out / "policy")
    rows = ["--train-rows", "256", "--validation-rows", "128", "--seed", str(seed)]
    return write_rows(["--config", str(LOOPS), "--out", str(out), *rows])


def main(arguments: list[str] | None = None) -> int:
    """Write the files and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.self_play.tiny", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, required=True, help="directory to write to")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--conversations", type=int, default=2560, help="of the warm-up")
    given = parser.parse_args(arguments)
    try:
        return make(given.out, given.seed, given.conversations)
    except UserError as error:
        return complain(error)


if __name__ == "__main__":
    sys.exit(main())
