"""A GRPO step with one calculator tool, against TRL 1.16.0: the same policy, prompts and amount of work.

    python -m benchmarks.training.grpo_step [--trl-python PATH] [--steps 7]

16 prompts x 8 generations x 2 turns of at most 32 new tokens, one optimizer step, one thread; the policy (Qwen3-shaped,
hidden 128, 3 layers, 0.64 M parameters) was warmed up so that it calls the calculator once and then answers. Both
trainers wait in processes of their own and take turns, so that what else the machine does falls on both alike. Without
--trl-python an environment with TRL is made in runs/trl-env.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from agentrl.chat import Chat
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.sft import SFTConfig, SFTDataConfig, SFTModelConfig, SFTTrainerConfig
from agentrl.observe.open import open_display
from agentrl.quickstart.assets import write_untrained
from agentrl.quickstart.tiny_policy import TinyShape
from agentrl.trainer.run_sft import train_sft
from agentrl.trajectory import Message
from benchmarks.bounded_pip import pip
from benchmarks.training.arithmetic_floor import Work, measure
from data_prep.made_up import Task, arithmetic
from data_prep.transcripts import TOOLS, good

TRL = "1.16.0"
SHAPE = TinyShape(vocab=409, hidden=128, layers=3, heads=4, kv_heads=2, intermediate=384)
PROMPTS, GENERATIONS, TURN_TOKENS, RESPONSE_TOKENS = 16, 8, 32, 96
WARM_UP_STEPS, WARM_UP_BATCH = 120, 32
SYSTEM = (
    "You answer questions about numbers. Never guess: call the calculator once with the whole sum, read what it says, "
    "and then give the final answer as a number after four hash signs."
)

Cost = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trl-python", type=Path, help="a Python that has TRL and no need of agentrl")
    parser.add_argument("--steps", type=int, default=7, help="measured steps of each trainer and tool")
    parser.add_argument("--delay", type=float, default=0.1, help="seconds that a call of the slow tool takes")
    given = parser.parse_args()
    trl_python = given.trl_python or trl_environment(Path("runs/trl-env"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy = warmed_up_policy(folder)
        rows = folder / "rows.json"
        rows.write_text(json.dumps(questions((given.steps + 1) * PROMPTS)), encoding="utf-8")
        work = work_of(policy)
        print(f"prompt {work.prompt} tokens, call {work.call}, tool's answer {work.observation}, answer {work.answer}")
        fast = interleaved(trl_python, policy, rows, 0.0, given.steps)
        report_cpu(fast, work)
        slow = interleaved(trl_python, policy, rows, given.delay, given.steps)
        report_wall(slow, given.delay)


def warmed_up_policy(folder: Path) -> Path:
    """A policy that calls the calculator once and then answers. About a minute."""
    rng = random.Random(1)
    tasks = [arithmetic(rng, "train") for _ in range(WARM_UP_STEPS * WARM_UP_BATCH)]
    conversations = folder / "sft.parquet"
    rows = [{"messages": conversation(task), "tools": json.dumps(TOOLS[:1])} for task in tasks]
    pq.write_table(pa.Table.from_pylist(rows), conversations)
    write_untrained(folder / "untrained", conversations, 1, SHAPE)
    config = SFTConfig(
        data=SFTDataConfig(train_files=str(conversations), train_batch_size=WARM_UP_BATCH),
        model=SFTModelConfig(path=str(folder / "untrained")),
        optim=OptimConfig(
            name="muon", lr=0.02, adamw_lr=6e-3, betas=(0.9, 0.95), weight_decay=0.0, lr_scheduler_type="linear"
        ),
        trainer=SFTTrainerConfig(default_local_dir=str(folder / "sft"), device="cpu", logger=[]),
    )
    with open_display("warm-up") as display:
        train_sft(config, display)
    return folder / "sft" / "policy"


def conversation(task: Task) -> list[Message]:
    return [{"role": "system", "content": SYSTEM}, *good(task)[1:]]


def questions(count: int) -> list[dict[str, object]]:
    rng = random.Random(2)
    tasks = [arithmetic(rng, "val") for _ in range(count)]
    return [{"prompt": conversation(task)[:2], "ground_truth": task.answer} for task in tasks]


def work_of(policy: Path) -> Work:
    """Lengths of a typical trajectory."""
    chat = Chat.from_pretrained(str(policy))
    messages = conversation(arithmetic(random.Random(3), "val"))
    ids, mask = chat.render_training(messages, list(TOOLS[:1]))
    starts = [i for i in range(1, len(ids)) if mask[i] and not mask[i - 1]]
    ends = [i for i in range(1, len(ids)) if mask[i - 1] and not mask[i]] + [len(ids)]
    (call, answer), (called, answered) = starts, ends[:2]
    return Work(PROMPTS, GENERATIONS, call, called - call, answer - called, answered - answer)


def interleaved(trl_python: Path, policy: Path, rows: Path, delay: float, steps: int) -> dict[str, list[Cost]]:
    """Costs of `steps` steps of each, taken in turns after one step to warm up."""
    costs: dict[str, list[Cost]] = {"ours": [], "trl": []}
    trl_script = str(Path(__file__).with_name("grpo_step_trl.py"))
    commands = {
        "ours": [sys.executable, "-m", "benchmarks.training.grpo_step_ours"],
        "trl": [str(trl_python), trl_script],
    }
    with (
        trainer(commands["ours"], policy, rows, delay) as ours,
        trainer(commands["trl"], policy, rows, delay) as trl,
    ):
        for step in range(steps + 1):
            for name, process in (("ours", ours), ("trl", trl)):
                cost = one_step(process)
                if step:
                    costs[name].append(cost)
            print(f"tool of {delay:g} s, step {step}/{steps}", file=sys.stderr, flush=True)
    return costs


@contextmanager
def trainer(command: list[str], policy: Path, rows: Path, delay: float) -> Iterator[subprocess.Popen[str]]:
    """A trainer that makes one step for each line it is given."""
    options = {
        "policy": policy,
        "rows": rows,
        "delay": delay,
        "prompts": PROMPTS,
        "generations": GENERATIONS,
        "turn-tokens": TURN_TOKENS,
        "response-tokens": RESPONSE_TOKENS,
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        try:
            yield process
        except TrainerEndedError as error:
            log.seek(0)
            raise SystemExit(f"{command[-1]} ended:\n{log.read()[-4000:]}") from error
        finally:
            process.kill()
            process.wait()


class TrainerEndedError(RuntimeError):
    """A trainer gave no answer."""


def one_step(process: subprocess.Popen[str]) -> Cost:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write("step\n")
        process.stdin.flush()
    except BrokenPipeError as error:
        raise TrainerEndedError from error
    line = process.stdout.readline()
    if not line:
        raise TrainerEndedError
    cost: Cost = json.loads(line)
    return cost


def median(costs: list[Cost], key: str) -> float:
    return statistics.median(cost[key] for cost in costs)


def report_cpu(costs: dict[str, list[Cost]], work: Work) -> None:
    rollouts = PROMPTS * GENERATIONS
    for name, rows in costs.items():
        seconds = sorted(row["cpu"] for row in rows)
        print(
            f"{name:>5}: {median(rows, 'cpu'):.2f} CPU-s a step ({seconds[0]:.2f}-{seconds[-1]:.2f}), "
            f"{rollouts / median(rows, 'cpu'):.0f} rollouts per CPU-s, "
            f"{median(rows, 'response'):.1f} tokens after the prompt"
        )
    ours, trl = median(costs["ours"], "cpu"), median(costs["trl"], "cpu")
    floor, flops = measure(SHAPE, work)
    print(f"ratio: {trl / ours:.2f} times TRL's rollouts per CPU-s")
    print(
        f"floor: {floor:.2f} CPU-s of matrix products ({flops / 1e9:.0f} GFLOP at {flops / floor / 1e9:.0f} GFLOP/s), "
        f"{floor / ours:.0%} of our step; it would be {trl / floor:.1f} times TRL's rollouts per CPU-s"
    )


def report_wall(costs: dict[str, list[Cost]], delay: float) -> None:
    ours, trl = median(costs["ours"], "wall"), median(costs["trl"], "wall")
    print(f"with a tool of {delay:g} s: ours {ours:.2f} s a step by the clock, trl {trl:.2f} s; ratio {trl / ours:.1f}")


def trl_environment(folder: Path) -> Path:
    """An environment with TRL beside the torch and transformers that we run on; made when it is not there."""
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        venv.create(folder, with_pip=True, clear=True)
        torch, transformers = (f"{name}=={version(name)}" for name in ("torch", "transformers"))
        index = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]  # asked for torch alone
        pip("install", "--no-deps", *index, torch, python=python)
        pip("install", torch, transformers, f"trl=={TRL}", python=python)
        (folder / "made").touch()
    return python


if __name__ == "__main__":
    main()
