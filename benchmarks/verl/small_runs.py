"""Runs a small command of each family of verl's commands, and compares it with the formulas of its release.

A command keeps the keys that decide its algorithm; its model, batches and lengths are small. `python -m agentrl.verl.*`
would do the same with it. What the run did is read while it trains: the batch of each update, its metrics, validations
and the weights at its end. `benchmarks.verl.release_steps` computes the same numbers on the run's trajectories. Prints
for each family the largest differences, after them those of runs with a fault, which have to be found:

    python -m benchmarks.verl.small_runs
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import yaml
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers import AutoModelForCausalLM

from agentrl.config import load_config
from agentrl.quickstart.tiny_policy import make_tiny_policy
from agentrl.train import training
from agentrl.trainer.observer import Step, StepObserver
from agentrl.trajectory.batch import RaggedBatch
from agentrl.verl.launch import CONFIGS, arguments
from benchmarks.verl.release_steps import ACTOR, CRITIC, RATES, ROLLOUT, Found, Release, Replay, Row
from benchmarks.verl.values import values_of
from tests.e2e.taught import teach

QUESTION = "What is the code of Zed?"
STEPS = 3
TOLERANCE = {"weights": 0.02}
"""How far roundings of float32 may take a quantity; 1e-3 where it is not named."""
SMALL = (
    *("data.train_files=FOLDER/train.parquet", "data.val_files=FOLDER/test.parquet", "data.max_prompt_length=400"),
    *("data.train_batch_size=4", f"{ACTOR}.optim.lr=1e-3", "trainer.logger=[console]", "trainer.save_freq=-1"),
    *(f"{ROLLOUT}.name=embedded", f"{ROLLOUT}.tensor_model_parallel_size=1", "trainer.n_gpus_per_node=1"),
    *(f"trainer.total_training_steps={STEPS}", "trainer.nnodes=1", "+actor_rollout_ref.model.dtype=float32"),
    *("actor_rollout_ref.model.path=FOLDER/policy", "trainer.default_local_dir=FOLDER/run"),
    "+custom_reward_function.path=FOLDER/scorer.py",
)
"""Words that make a command small."""
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = len(solution_str) % 7 / 7
    return {"score": found, "acc": found}
"""
"""Scores a text by its length, so that answers to one prompt differ."""
TOOL = """
tools:
  - class_name: verl.tools.gsm8k_tool.Gsm8kTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: calc_gsm8k_reward
        description: Checks an answer.
        parameters: {type: object, properties: {answer: {type: string, description: It.}}, required: [answer]}
"""
WALK = """
interaction:
  - name: corridor
    class_name: interactions.environment.EnvironmentInteraction
    config: {factory: "benchmarks.verl.small_runs:Corridor", max_steps: 4}
"""
CALL = '<tool_call>\n{"name": "calc_gsm8k_reward", "arguments": {"answer": "412"}}\n</tool_call><|im_end|>'

SEARCH = "<search>code of Zed</search>", "<answer>412</answer>"
FOUND = ("\n\n<information>Doc 1(Title: Zed) The code of Zed is 412.</information>\n\n",)
"""Turns of Search-R1's policy, and the text between them."""
TAGGED = f"{QUESTION} Use <search> and <answer>."
"""Search-R1's rows name the tags. A prompt that does not gets instructions, which the lessons do not have."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family of commands: the module, its decisive words, and the release whose formulas hold."""

    module: str
    release: Release
    words: tuple[str, ...]
    turns: tuple[str, ...] = ()
    """Texts that the policy is taught to say, with an observation between two; empty: it is random."""
    between: tuple[str, ...] = ()
    asks: str = QUESTION
    lessons: int = 50
    """Few enough that the policy still errs, so that answers to one prompt differ."""
    counted: Mapping[str, Any] = field(default_factory=dict)
    """Values that the release's own trainer computes of others."""
    is_apart: bool = False
    """The recorder sees no single step of the optimizer; gradient norms and weights are compared all the same."""
    here: frozenset[str] = frozenset()
    """Differences that docs/verl.md says, which the formulas take over, so that nothing else may differ."""
    differs: frozenset[str] = frozenset()
    """Quantities in which the run differs from the release, as docs/verl.md says."""


FAMILIES = {
    "main, PPO": Family(
        "verl.trainer.main_ppo",
        "main",
        (
            *(
                "data.max_response_length=16",
                f"{ACTOR}.ppo_mini_batch_size=2",
                f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
            ),
            *("critic.optim.lr=1e-3", "critic.model.path=FOLDER/policy", "critic.ppo_micro_batch_size_per_gpu=4"),
            *("algorithm.kl_ctrl.kl_coef=0.001", "trainer.test_freq=2", "trainer.critic_warmup=2", f"{ROLLOUT}.n=2"),
            *("algorithm.lam=0.95", "algorithm.gamma=0.99"),
        ),
    ),
    "main, GRPO with a tool": Family(
        "verl.trainer.main_ppo",
        "main",
        (
            *("algorithm.adv_estimator=grpo", "data.max_response_length=200", f"{ACTOR}.ppo_mini_batch_size=2"),
            *(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.kl_loss_type=low_var_kl"),
            *(f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.entropy_coeff=0", f"{ACTOR}.ppo_epochs=2"),
            *("algorithm.use_kl_in_reward=False", f"{ROLLOUT}.n=4", f"{ROLLOUT}.multi_turn.enable=True"),
            *(f"{ROLLOUT}.multi_turn.tool_config_path=FOLDER/tools.yaml", f"{ROLLOUT}.multi_turn.format=hermes"),
            *(f"{ROLLOUT}.agent.default_agent_loop=tool_agent", f"{ROLLOUT}.multi_turn.max_assistant_turns=2"),
        ),
        (CALL, "It is 412.<|im_end|>"),
        ("\n<|im_start|>user\n<tool_response>\n412 is right.\n</tool_response><|im_end|>\n<|im_start|>assistant\n",),
        lessons=70,
    ),
    "0.2, PPO": Family(
        "verl.trainer.main_ppo",
        "0.2",
        (
            *("data.max_response_length=16", f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_micro_batch_size=2"),
            *("critic.optim.lr=1e-3", "critic.model.path=FOLDER/policy", "critic.ppo_micro_batch_size=2"),
            *("algorithm.kl_ctrl.kl_coef=0.02", f"{ROLLOUT}.log_prob_micro_batch_size=8", "data.val_batch_size=2"),
        ),
        differs=frozenset({"last step"}),
    ),
    "0.2, PPO on its defaults": Family(
        "verl.trainer.main_ppo",
        "0.2",
        (
            *("data.max_response_length=40", f"{ACTOR}.ppo_mini_batch_size=4", f"{ACTOR}.ppo_micro_batch_size=4"),
            *("critic.optim.lr=1e-3", "critic.model.path=FOLDER/policy", "critic.ppo_micro_batch_size=4"),
        ),
        ("<answer>412</answer><|im_end|>",),
        lessons=30,
        here=frozenset({CRITIC}),
        differs=frozenset({"last step"}),
    ),
    "main, warm-up": Family(
        "verl.trainer.main_ppo",
        "main",
        (
            *("algorithm.adv_estimator=grpo", "data.max_response_length=16", f"{ACTOR}.ppo_mini_batch_size=2"),
            *(f"{ROLLOUT}.n=4", f"{ACTOR}.optim.lr_warmup_steps=2"),
        ),
        here=frozenset({RATES}),
        differs=frozenset({"actor/lr"}),
    ),
    "Search-R1's fork, PPO": Family(
        "verl.trainer.main_ppo",
        "search_r1",
        (
            *("data.max_response_length=60", "data.max_start_length=400", "data.max_obs_length=60"),
            *("algorithm.adv_estimator=gae", "algorithm.kl_ctrl.kl_coef=0.001", f"{ACTOR}.state_masking=true"),
            *(f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size=8", f"{ROLLOUT}.n_agent=4"),
            *("critic.optim.lr=1e-3", "critic.model.path=FOLDER/policy", "critic.ppo_micro_batch_size=8"),
            *(
                f"{ACTOR}.optim.lr=1e-4",
                f"{ROLLOUT}.temperature=1",
                "max_turns=2",
                "retriever.topk=1",
                'retriever.url="URL"',
            ),
        ),
        SEARCH,
        FOUND,
        asks=TAGGED,
        lessons=25,
        here=frozenset({CRITIC}),
        differs=frozenset({"last step"}),
    ),
    "Search-R1's fork": Family(
        "verl.trainer.main_ppo",
        "search_r1",
        (
            *("data.max_response_length=60", "data.max_start_length=400", "data.max_obs_length=60"),
            *("algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=true", f"{ACTOR}.kl_loss_coef=0.001"),
            *(f"{ACTOR}.kl_loss_type=low_var_kl", f"{ACTOR}.ppo_mini_batch_size=8", f"{ACTOR}.ppo_micro_batch_size=8"),
            *(f"{ACTOR}.state_masking=true", f"{ROLLOUT}.n_agent=4", f"{ROLLOUT}.temperature=1", "max_turns=2"),
            *(f"{ACTOR}.optim.lr_warmup_steps_ratio=0.285", "retriever.topk=1", 'retriever.url="URL"'),
        ),
        SEARCH,
        FOUND,
        asks=TAGGED,
        lessons=25,
        differs=frozenset({"last step"}),
    ),
    "DAPO's recipe": Family(
        "recipe.dapo.main_dapo",
        "main",
        (
            *("algorithm.adv_estimator=grpo", "data.max_response_length=24", f"{ACTOR}.ppo_mini_batch_size=2"),
            *(f"{ACTOR}.clip_ratio_low=0.2", f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.clip_ratio_c=10.0"),
            *(f"{ACTOR}.loss_agg_mode=token-mean", f"{ROLLOUT}.n=4", "data.gen_batch_size=4"),
            *("algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc"),
            *("algorithm.filter_groups.max_num_gen_batches=10", "reward_model.reward_manager=dapo"),
            *("reward_model.overlong_buffer.enable=True", "reward_model.overlong_buffer.len=16"),
            *("reward_model.overlong_buffer.penalty_factor=1.0", f"{ACTOR}.entropy_coeff=0"),
        ),
    ),
    "fully asynchronous": Family(
        "recipe.fully_async_policy.fully_async_main",
        "main",
        (
            *("algorithm.adv_estimator=grpo", "data.max_response_length=16", f"{ACTOR}.ppo_mini_batch_size=2"),
            *("async_training.require_batches=2", "async_training.trigger_parameter_sync_step=1"),
            *("async_training.staleness_threshold=1", f"{ROLLOUT}.n=4", "rollout.total_rollout_steps=12"),
        ),
        is_apart=True,
        counted={"data.train_batch_size": 4, "algorithm.rollout_correction.bypass_mode": True},
    ),
    **{
        f"verl-agent, GiGPO by {mode}": Family(
            "verl.trainer.main_ppo",
            "main",
            (
                *("algorithm.adv_estimator=gigpo", "data.max_response_length=300", f"{ACTOR}.ppo_mini_batch_size=2"),
                *("algorithm.gamma=0.95", "algorithm.gigpo.step_advantage_w=0.7", f"algorithm.gigpo.mode={mode}"),
                *(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.01", f"{ACTOR}.kl_loss_type=low_var_kl"),
                *(f"{ACTOR}.use_invalid_action_penalty=False", "algorithm.use_kl_in_reward=False"),
                *("env.env_name=corridor", "env.max_steps=4", "env.rollout.n=4"),
                f"{ROLLOUT}.multi_turn.interaction_config_path=FOLDER/talks.yaml",
            ),
            ("on<|im_end|>",) * 3,
            tuple(f"\n<|im_start|>user\nplace {one}<|im_end|>\n<|im_start|>assistant\n" for one in (1, 0)),
            lessons=12,
            counted={f"{ROLLOUT}.n": 4, f"{ACTOR}.entropy_coeff": 0.001},
        )
        for mode in ("mean_std_norm", "mean_norm")
    },
    "one step off": Family(
        "recipe.one_step_off_policy.main_ppo",
        "main",
        (
            *("algorithm.adv_estimator=grpo", "data.max_response_length=16", f"{ACTOR}.ppo_mini_batch_size=2"),
            *(f"{ROLLOUT}.n=4", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", f"{ACTOR}.use_kl_loss=True"),
        ),
        is_apart=True,
        counted={"algorithm.rollout_correction.bypass_mode": True},
    ),
}


class Corridor:
    """Environment of two places, in which each text is a step, rewarded by its length."""

    def reset(self, *, seed: int | None, options: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
        self.place = 0
        return "place 0", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.place = (self.place + len(action)) % 2
        return f"place {self.place}", len(action) % 5 / 5, False, False, {}


@dataclass(frozen=True, slots=True)
class Fault:
    """A command that is read otherwise than its release reads it, and the first number in which that has to show."""

    family: str
    changed: str
    shows_in: str


FAULTS = {
    "another mean": Fault("DAPO's recipe", f"{ACTOR}.loss_agg_mode=seq-mean-token-mean", "actor/pg_loss"),
    "another estimator of the KL": Fault("main, GRPO with a tool", f"{ACTOR}.kl_loss_type=kl", "actor/kl_loss"),
    "another course of the rate": Fault(
        "main, GRPO with a tool", f"{ACTOR}.optim.lr_scheduler_type=linear", "actor/lr"
    ),
    "a step later": Fault("main, PPO", "trainer.critic_warmup=3", "optimizer steps"),
    "fewer mini-batches": Fault("Search-R1's fork", f"{ACTOR}.ppo_mini_batch_size=16", "optimizer steps"),
    "no KL in the reward": Fault("0.2, PPO", "algorithm.kl_ctrl.kl_coef=0", "rewards"),
    "another validation": Fault("main, PPO", "trainer.test_freq=1", "validations"),
    "another discount": Fault("main, PPO", "algorithm.gamma=1.0", "advantages"),
    "another penalty": Fault("DAPO's recipe", "reward_model.overlong_buffer.len=8", "rewards"),
    "states without weight": Fault(
        "verl-agent, GiGPO by mean_norm", "algorithm.gigpo.step_advantage_w=0", "advantages"
    ),
}


@dataclass(slots=True)
class Recorded:
    """A run as it was observed."""

    rows: list[list[Row]] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    validated: list[int] = field(default_factory=list)
    optimizer_steps: list[int] = field(default_factory=list)
    """Number of parameters of the model of each, in order."""
    policy: Path = Path()
    """The weights at its end."""


class Recorder(StepObserver):
    """Reads the batch of each update, by sequence, and the metrics of its step."""

    def __init__(self, *, walks: bool) -> None:
        """`walks`: the run's turns are rewarded, by an environment."""
        self.recorded, self.walks = Recorded(), walks

    def on_batch(self, step: Step) -> None:
        batch = step.batch.load()
        bounds = batch.offsets.tolist()
        spans = [
            slice(start + step.outlines[owner].prompt_length, end)
            for start, end, owner in zip(bounds, bounds[1:], batch.trajectory.tolist(), strict=False)
        ]

        def by_row(column: torch.Tensor) -> list[Any]:
            return [column[span].tolist() for span in spans]

        old = batch.rollout_logprobs if batch.old_logprobs is None else batch.old_logprobs
        assert batch.advantages is not None
        self.recorded.rows.append(
            [
                Row(batch.ids[start : span.start].tolist(), batch.ids[span].tolist(), group, score, engine, turns)
                for start, span, group, score, engine, turns in zip(
                    bounds[:-1],
                    spans,
                    batch.group.tolist(),
                    [float(step.outlines[owner].score or 0.0) for owner in batch.trajectory.tolist()],
                    by_row(batch.rollout_logprobs),
                    [self.by_turn(batch, span) for span in spans],
                    strict=True,
                )
            ]
        )
        self.recorded.found.append(
            Found(
                sampled=by_row(batch.mask),
                old=by_row(old),
                rewards=by_row(batch.rewards),
                advantages=by_row(batch.advantages),
                values=None if batch.values is None else by_row(batch.values),
            )
        )

    def by_turn(self, batch: RaggedBatch, span: slice) -> list[float]:
        """Add up the rewards of each turn of a sequence, in an environment."""
        turns, rewards = batch.turn[span], batch.rewards[span]
        return [float(rewards[turns == one].sum()) for one in turns.unique().tolist() if one >= 0] if self.walks else []

    def on_end(self, step: Step) -> None:
        self.recorded.found[-1].numbers = dict(step.metrics)


def command(name: str, folder: Path, url: str = "", changed: Sequence[str] = ()) -> list[str]:
    """Write a family's small command; `changed` words replace the ones with their keys."""
    words = {one.partition("=")[0]: one for one in (*SMALL, *FAMILIES[name].words, *changed)}
    return [one.replace("FOLDER", str(folder)).replace("URL", f"{url}/retrieve") for one in words.values()]


def record(name: str, folder: Path, changed: Sequence[str] = ()) -> Recorded:
    """Run a family's command in a folder. `changed`: words that make a fault, which the comparison has to find."""
    family = FAMILIES[name]
    asked = [{"role": "user", "content": family.asks}]
    tools = [yaml.safe_load(TOOL)["tools"][0]["tool_schema"]] if "tools.yaml" in " ".join(family.words) else None
    walks = any(one.startswith("env.") for one in family.words)
    given: dict[str, Any] = (
        {"tools_kwargs": {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "412"}}}} if tools else {}
    )
    given |= {"interaction_kwargs": {"name": "corridor"}} if walks else {}
    rows: list[dict[str, Any]] = [
        {
            "data_source": "openai/gsm8k",
            "prompt": asked if family.turns else [{"role": "user", "content": f"{QUESTION} {index}"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": "412"},
            "extra_info": {"index": index, **given},
        }
        for index in range(12)
    ]
    for file, count in (("train.parquet", 12), ("test.parquet", 2)):
        pq.write_table(pa.Table.from_pylist(rows[:count]), folder / file)
    (folder / "tools.yaml").write_text(TOOL)
    (folder / "scorer.py").write_text(SCORER)
    (folder / "talks.yaml").write_text(WALK)
    if not (folder / "policy").exists():
        make_policy(folder / "policy", family, asked, tools)
    recorder = Recorder(walks=walks)
    with retriever() as url, counted(recorder.recorded.optimizer_steps):
        config = load_config(arguments(command(name, folder, url, changed), CONFIGS[family.module]))
        with training(config, observers=[recorder]) as run:
            for _ in run:
                pass
    metrics = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    recorder.recorded.validated = [int(one["step"]) for one in metrics if "time/validation" in one]
    recorder.recorded.policy = folder / "run" / "policy"
    return recorder.recorded


def make_policy(folder: Path, family: Family, asked: list[dict[str, Any]], tools: Any) -> None:
    """Write the policy that the run starts from."""
    if family.turns:
        teach(folder, list(family.turns), list(family.between), asked, tools, steps=family.lessons)
    else:
        make_tiny_policy(folder, seed=3)


@contextmanager
def counted(steps: list[int]) -> Iterator[None]:
    """Append to `steps` the number of parameters of each optimizer that takes a step, in order."""

    def count(optimizer: torch.optim.Optimizer, *_: object) -> None:
        steps.append(sum(param.numel() for group in optimizer.param_groups for param in group["params"]))

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def retriever() -> Iterator[str]:
    """Serve one document to every query, in the form of Search-R1's retriever; give its address."""

    class Answer(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            document = {"document": {"contents": '"Zed"\nThe code of Zed is 412.'}, "score": 1.0}
            text = json.dumps({"result": [[document] for _ in asked["queries"]]}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def replayed(name: str, folder: Path, recorded: Recorded, *, steps: int = STEPS, as_here: bool = True) -> Replay:
    """Replay a run by its release's formulas; `Replay.found` then has its steps.

    `as_here`: with the differences that docs/verl.md says.
    """
    family = FAMILIES[name]
    values = values_of(command(name, folder), family.release) | dict(family.counted)
    replay = Replay(folder / "policy", values, family.release, STEPS, family.here if as_here else frozenset())
    for number, rows in enumerate(recorded.rows[:steps], start=1):
        replay.found.append(replay.step(number, rows))
    return replay


def compared(name: str, folder: Path, fault: Fault | None = None) -> tuple[Recorded, dict[str, float]]:
    """Run a family's command, with a fault or without, and measure how far it is from its release."""
    recorded = record(name, folder, () if fault is None else (fault.changed,))
    return recorded, differences(name, recorded, replayed(name, folder, recorded))


def first_step_apart(name: str, folder: Path, recorded: Recorded) -> dict[str, float]:
    """Measure what the differences of agentrl change in the first step, from equal weights, by quantity."""
    ours, theirs = (replayed(name, folder, recorded, steps=1, as_here=one).found[0] for one in (True, False))
    own = [
        (a, b)
        for one, other in zip(ours.advantages, theirs.advantages, strict=True)
        for a, b in zip(one, other, strict=True)
    ]
    return {"advantages": max(abs(a - b) for a, b in own)} | {
        term: abs(value - theirs.numbers[term]) / max(abs(theirs.numbers[term]), 1e-3)
        for term, value in ours.numbers.items()
    }


def differences(name: str, recorded: Recorded, replay: Replay) -> dict[str, float]:
    """Measure how far a run is from its replay, by quantity; 0 or a rounding where they agree."""
    pairs = list(zip(recorded.found, replay.found, strict=True))
    own = [
        (mine, theirs, row, t)
        for mine, theirs in pairs
        for row, mask in enumerate(theirs.sampled)
        for t, is_own in enumerate(mask)
        if is_own
    ]

    def largest(column: Callable[[Found], list[list[float]] | None]) -> float:
        found = [(column(mine), column(theirs), row, t) for mine, theirs, row, t in own]
        return max(abs(a[row][t] - b[row][t]) for a, b, row, t in found if a is not None and b is not None)

    masks = [(a, b) for mine, theirs in pairs for a, b in zip(mine.sampled, theirs.sampled, strict=True)]
    found = {
        "masks": float(sum(a != b for mine, theirs in masks for a, b in zip(mine, theirs, strict=True))),
        "log-probs": largest(lambda one: one.old),
        "rewards": largest(lambda one: one.rewards),
        "advantages": largest(lambda one: one.advantages),
    }
    if pairs[0][1].values is not None:
        found["values"] = largest(lambda one: one.values)
    assert max(abs(one) for _, theirs in pairs for row in theirs.advantages for one in row) > 0.01, "all are equal"
    for mine, theirs in pairs:
        for term, value in theirs.numbers.items():
            apart = abs(mine.numbers[term] - value) / max(abs(value), 1e-3) if term in mine.numbers else math.inf
            found[term] = max(found.get(term, 0.0), apart)
    if not FAMILIES[name].is_apart:
        sizes = {sum(p.numel() for p in model.parameters()): role for role, model in replay.models.items()}
        found["optimizer steps"] = float([sizes[one] for one in recorded.optimizer_steps] != replay.taken)
    found["validations"] = float(recorded.validated != replay.validations())
    found["last step"] = float(len(recorded.found) - replay.last_step())
    start, end, right = (_weights(one) for one in (replay.folder, recorded.policy, replay.policy))
    found["weights"] = float((end - right).norm() / (right - start).norm())
    return found


def different(found: Mapping[str, float]) -> set[str]:
    """Name the quantities that differ by more than roundings."""
    return {name for name, value in found.items() if not abs(value) < TOLERANCE.get(name, 1e-3)}


def _weights(model: Path | torch.nn.Module) -> torch.Tensor:
    module = AutoModelForCausalLM.from_pretrained(model) if isinstance(model, Path) else model
    return torch.cat([one.detach().double().flatten() for _, one in sorted(module.named_parameters())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*FAMILIES, *FAULTS], help="of families and faults")
    logging.disable()
    for name in parser.parse_args().names:
        fault = FAULTS.get(name)
        with tempfile.TemporaryDirectory() as folder:
            recorded, found = compared(name if fault is None else fault.family, Path(folder), fault)
            here = fault is None and FAMILIES[name].here
            apart = first_step_apart(name, Path(folder), recorded) if here else {}
        print(f"{name}: differs in {', '.join(sorted(different(found))) or 'nothing'}")
        print(
            "   ",
            f"{len(recorded.optimizer_steps)} optimizer steps, validated after {recorded.validated};",
            ", ".join(f"{what} {value:.1e}" for what, value in found.items()),
            flush=True,
        )
        if apart:
            print(
                "    first step by the release alone:",
                ", ".join(f"{what} {value:.1e}" for what, value in apart.items()),
            )


if __name__ == "__main__":
    main()
