"""TRL's door, whole: the page's script, the same run by YAML, callbacks, resuming, and what bad input gets."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import TrainerCallback, TrainerState

from agentrl.errors import CodeError, ConfigError, DataError, TrainingError, UserError, install_extra
from agentrl.tool import ToolResponse
from agentrl.tool.session import gathered
from agentrl.trajectory.parquet import read_trajectories, trajectory_files
from agentrl.trl import GRPOConfig, GRPOTrainer
from agentrl.trl.adapters import adapter_keys
from agentrl.trl.arguments import ROLLOUT
from agentrl.trl.callbacks import Callbacks
from agentrl.trl.order import RepeatOrder
from agentrl.trl.rows import read_data, read_rows
from agentrl.trl.tools import as_tools
from tests.e2e.conftest import PROJECT
from tests.e2e.test_docs import blocks
from tests.forked import forked
from tests.naming import Names, assert_names, naming

SMALL: dict[str, float] = {
    "per_device_train_batch_size": 8,
    "num_generations": 4,
    "max_completion_length": 24,
    "max_steps": 2,
}
SMALL |= {"max_prompt_length": 400, "logging_steps": 1, "learning_rate": 1e-3}
ROWS = [{"prompt": [{"role": "user", "content": f"Say {number}."}], "number": number} for number in range(8)]
SAME = ("reward/mean", "reward/std", "actor/pg_loss", "actor/grad_norm", "actor/lr", "actor/entropy")
"""Numbers of a step that are the same by YAML."""


def length(completions: list[Any], **kwargs: Any) -> list[float]:
    return [len(completion[-1]["content"]) % 7 / 7 for completion in completions]


def steps_of(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in SAME} for line in lines if "reward/mean" in line]


def trainer_of(policy: Path, reward: Any = length, rows: Any = ROWS, **arguments: Any) -> GRPOTrainer:
    of_trainer = ("tools", "callbacks", "eval_dataset", "peft_config", "processing_class", "environment_factory")
    more = {name: arguments.pop(name) for name in of_trainer if name in arguments}
    args = GRPOConfig("run", **{**SMALL, **arguments})
    return GRPOTrainer(policy, reward, args, rows, **more)


def test_the_pages_script_gives_the_numbers_of_the_same_run_by_yaml(taught: Path, tmp_path: Path) -> None:
    script = blocks("docs/trl.md", "python")[0]
    small = {
        "per_device_train_batch_size=32": "per_device_train_batch_size=16",
        "num_generations=8": "num_generations=4",
        "max_completion_length=256": "max_completion_length=80",
        "max_steps=20": "max_steps=2, max_prompt_length=300",
        "random.randrange(100), random.randrange(100)": "12, 7",
        "range(256)": "range(16)",
    }
    for was, now in small.items():
        assert was in script
        script = script.replace(was, now)
    (tmp_path / "multiply.py").write_text(script)
    done = forked([tmp_path / "multiply.py", taught], tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "multiply"
    assert (run / "final" / "model.safetensors").is_file() and (run / "final" / "tokenizer.json").is_file()
    found = steps_of(run)
    written = [one for file in trajectory_files(run / "trajectories") for one in read_trajectories(file)]
    assert len(written) == 32 and any(call.response == "84" for one in written for call in one.tool_calls)
    assert len(found) == 2 and found[0]["actor/grad_norm"] > 0

    by_yaml = {
        "defaults": ["train", "_self_"],
        "data": {
            "train_files": str(next((tmp_path / "multiply.data").iterdir())),
            "val_files": None,
            "train_batch_size": 4,
            "max_prompt_length": 300,
            "max_response_length": 80,
            "seed": 42,
            "sampler": {"name": "agentrl.trl.order:RepeatOrder"},
        },
        "actor_rollout_ref": {
            "model": {"path": str(taught), "enable_gradient_checkpointing": True},
            "rollout": {
                "n": 4,
                "multi_turn": {"tool_config_path": "tools.yaml", "max_assistant_turns": 50, "max_malformed": 0},
                "agent": {"default_agent_loop": "tool_agent"},
            },
            "actor": {
                "ppo_mini_batch_size": 4,
                "loss_agg_mode": "token-mean",
                "optim": {"lr": 1e-5, "weight_decay": 0.0, "lr_scheduler_type": "linear"},
            },
        },
        "algorithm": {"adv_estimator": "agentrl.trl.advantages:relative"},
        "custom_reward_function": {"path": "reward.py"},
        "trainer": {"seed": 42, "total_training_steps": 2, "default_local_dir": "by_yaml"},
    }
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(by_yaml))
    (tmp_path / "tools.yaml").write_text("tools:\n  - function: multiply_tool.py:multiply\n")
    (tmp_path / "multiply_tool.py").write_text(script[script.index("def multiply") : script.index("def correct")])
    (tmp_path / "reward.py").write_text(
        "def compute_score(trajectory, **_):\n"  # a turn with a call that cannot be read is text for the script
        "    turns = [one for one in trajectory.messages if one['role'] == 'assistant']\n"
        "    raw = [one['function']['arguments'] for one in turns[-1].get('tool_calls', ())]\n"
        "    broken = any(isinstance(one, str) for one in raw)\n"
        "    text = f'{turns[-1]}' if broken else trajectory.messages[-1]['content']\n"
        "    calls = sum('tool_calls' in one for one in turns) - broken\n"
        "    return float('84' in text) + 0.1 * min(calls, 1)\n"
    )
    done = forked(["-m", "agentrl.train", "--config-path", tmp_path, "--config-name", "mine"], tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    for ours, theirs in zip(found, steps_of(tmp_path / "by_yaml"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-9)


class Watching(TrainerCallback):
    def __init__(self, stop_at: int | None = None) -> None:
        self.events: list[tuple[str, int]] = []
        self.stop_at = stop_at

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("begin", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("step", state.global_step))
        if state.global_step == self.stop_at:
            control.should_training_stop = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.events.append(("log", state.global_step))
        if "train_runtime" in logs:  # transformers' last entry, of the whole training
            assert logs["train_runtime"] > 0 and "train_loss" in logs
        else:
            assert logs["learning_rate"] > 0 and logs["rewards/length/mean"] >= 0

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **kwargs: Any) -> None:
        assert metrics["eval_reward"] >= 0
        self.events.append(("evaluate", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.events.append(("end", state.global_step))


def test_callbacks_history_evaluation_and_resuming(policy_dir: Path, at_home: Path) -> None:
    seen: list[int] = []

    async def counted(completions: list[Any], number: list[int], trainer_state: Any, **kwargs: Any) -> list[Any]:
        seen.append(trainer_state.global_step)
        assert len(number) == len(completions) and len(set(number)) == 1
        return [None if place == 0 else 1.0 for place in range(len(completions))]

    watching = Watching()
    trainer = trainer_of(
        policy_dir,
        [length, counted],
        callbacks=[watching],
        eval_dataset=ROWS[:2],
        num_generations_eval=2,
        reward_weights=[1.0, 0.5],
        eval_on_start=True,
    )
    result = trainer.train()
    assert result.global_step == 2 and trainer.state.global_step == 2
    assert watching.events == [
        *(("begin", 0), ("evaluate", 0), ("step", 1), ("log", 1), ("step", 2), ("log", 2), ("log", 2), ("end", 2)),
    ]
    assert set(seen) == {0, 1}
    history = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert [entry["step"] for entry in history] == [1, 2] and history[0]["rewards/counted/mean"] == 1.0
    assert history[0]["learning_rate"] == pytest.approx(1e-3)
    found = trainer.evaluate()
    assert found["eval_reward"] == pytest.approx(found["eval_trl/mean@2"])
    assert (at_home / "run" / "policy" / "model.safetensors").is_file()

    again = trainer_of(policy_dir, max_steps=3)
    assert again.train(resume_from_checkpoint=True).global_step == 3
    assert [entry["step"] for entry in again.state.log_history] == [0, 1, 2, 3, 3]
    assert again.state.log_history[:3] == trainer.state.log_history[:3]
    assert again.state.log_history[-1]["train_runtime"] > 0


def test_a_second_training_of_a_trainer_begins_as_a_first_one(policy_dir: Path, at_home: Path) -> None:
    """transformers forgets that a callback asked for the end of the training before, and its history."""
    watching = Watching(stop_at=1)
    trainer = trainer_of(policy_dir, callbacks=[watching], max_steps=3)
    assert trainer.train().global_step == 1
    watching.stop_at = None
    assert trainer.train(resume_from_checkpoint=True).global_step == 3
    steps = [entry["step"] for entry in trainer.state.log_history]
    assert steps == [1, 2, 3, 3]
    watching.stop_at = 2
    assert trainer.train().global_step == 2
    assert [entry["step"] for entry in trainer.state.log_history] == [1, 2, 2]
    assert [event for event in watching.events if event[0] == "begin"] == [("begin", 0), ("begin", 1), ("begin", 0)]


def test_a_resumed_run_gives_reward_functions_the_step_of_an_undisturbed_one(policy_dir: Path, at_home: Path) -> None:
    def train(folder: str, steps: int, *, resumes: bool = False) -> tuple[list[tuple[int, float]], list[object]]:
        seen: list[tuple[int, float]] = []

        def reward(completions: list[Any], trainer_state: Any, **kwargs: Any) -> list[float]:
            seen.append((trainer_state.global_step, trainer_state.epoch))
            sign = 1 if trainer_state.global_step < 4 else -1
            return [sign * value for value in length(completions)]

        class Begins(TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                begins.append(state.global_step)

        begins: list[int] = []
        more: dict[str, Any] = {"steps_per_generation": 2, "loss_type": "grpo", "lr_scheduler_type": "constant"}
        more |= {"max_steps": steps, "eval_strategy": "steps", "eval_steps": 4, "num_generations_eval": 2}
        args = GRPOConfig(folder, **{**SMALL, **more})
        trainer = GRPOTrainer(policy_dir, reward, args, ROWS, ROWS[:1], callbacks=[Begins()])
        trainer.train(resume_from_checkpoint=resumes)
        assert begins == [4 if resumes else 0]
        return seen, [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]

    seen, rewards = train("whole", 8)
    # Of a generation 4 prompts and 2 optimizer steps; the validation sees the step that it is of.
    steps = [(0, 0.0)] * 4 + [(2, 0.5)] * 4 + [(4, 1.0)] * 5 + [(6, 1.5)] * 4 + [(8, 2.0)]
    assert seen == steps
    first = train("parts", 4)
    second = train("parts", 8, resumes=True)
    assert first[0] + second[0] == steps and second[1] == rewards == first[1] + rewards[len(first[1]) :]


def test_a_resumed_history_goes_on_within_a_mean_and_leaves_a_repeated_validation_out_of_it(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    lines: list[dict[str, Any]] = [{"step": 0, "val/reward_sampled": 0.5}]
    lines += [{"step": number, "reward/mean": float(number), "odd": None} for number in (1, 2, 3)]
    lines += [{"step": 3, "val/reward_sampled": 0.7}]  # of an earlier resumption
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def history(*, resumes: bool) -> list[dict[str, Any]]:
        state, every = TrainerState(max_steps=12), {"log_every": 2, "save_every": -1, "steps_per_epoch": 4}
        callbacks = Callbacks([], GRPOConfig(str(tmp_path)), state, updates=3, file=file, **every)
        callbacks.forget_after(3 if resumes else -1)
        for line in [] if resumes else lines:
            metrics = {name: value for name, value in line.items() if name != "step" and value is not None}
            step: Any = SimpleNamespace(number=line["step"], metrics=metrics, stop=None)
            callbacks.on_published(step)
            callbacks.on_first_validation(step) if "val/reward_sampled" in metrics else callbacks.on_end(step)
        last: Any = SimpleNamespace(number=4, metrics={"reward/mean": 4.0}, stop=None)
        callbacks.on_published(last)
        callbacks.on_end(last)
        return state.log_history

    resumed = history(resumes=True)
    assert resumed == history(resumes=False)
    assert [(entry["step"], entry.get("reward")) for entry in resumed] == [(0, None), (6, 1.5), (9, None), (12, 3.5)]


def test_several_optimizer_steps_a_generation_have_falling_rates(policy_dir: Path, at_home: Path) -> None:
    """GSPO's published settings, with TRL's default of the schedule, and logs that fall into a generation."""
    gspo: dict[str, Any] = {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "steps_per_generation": 4,
        "beta": 0.1,
        "use_bias_correction_kl": False,
    }
    trainer = trainer_of(policy_dir, per_device_train_batch_size=4, max_steps=8, logging_steps=3, **gspo)
    result = trainer.train()
    assert result.global_step == 8
    *history, last = trainer.state.log_history
    assert [entry["step"] for entry in history] == [4, 8] and last["train_loss"] == result.training_loss
    for entry in history:  # the whole loss, as TRL's
        assert entry["kl"] > 1e-3 and entry["loss"] == pytest.approx(entry["actor/pg_loss"] + 0.1 * entry["kl"])
    assert result.training_loss == pytest.approx(sum(entry["loss"] for entry in history) / 2)
    rates = [1e-3 * (1 - place / 8) for place in range(8)]
    assert [entry["learning_rate"] for entry in history] == pytest.approx([sum(rates[:4]) / 4, sum(rates[4:]) / 4])


def test_adapters_of_peft_are_trained_and_exported(policy_dir: Path, at_home: Path) -> None:
    from peft import LoraConfig
    from safetensors.torch import load_file

    trainer = trainer_of(policy_dir, peft_config=LoraConfig(r=2, target_modules=["q_proj", "v_proj"]), max_steps=1)
    trainer.train()
    before, after = load_file(policy_dir / "model.safetensors"), load_file("run/policy/model.safetensors")
    changed = {name for name, value in after.items() if not value.equal(before[name])}
    assert changed and all(name.endswith(("q_proj.weight", "v_proj.weight")) for name in changed)


MY_LOSS = """
from agentrl.algorithms import TokenLoss, declare

@declare(advantage_only=True)
def reinforce(columns, config):
    return TokenLoss(-columns.advantages * columns.logprobs, {"mine": columns.mask.sum()})
"""


def test_a_loss_of_ones_own_leaves_trls_clip_without_effect_and_refuses_a_given_one(
    policy_dir: Path, at_home: Path
) -> None:
    Path("my_loss.py").write_text(MY_LOSS)
    loss = {"actor_rollout_ref.actor.policy_loss.loss_mode": "my_loss.py:reinforce"}
    trainer_of(policy_dir, max_steps=1, overrides=loss).train()
    (step,) = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert step["actor/mine"] > 0
    with naming(ConfigError, "actor_rollout_ref.actor.clip_ratio_low=0.3", "loss_mode=vanilla"):
        trainer_of(policy_dir, max_steps=1, epsilon=0.3, overrides=loss).train()


def test_vllm_that_is_missing_is_refused_in_words(
    policy_dir: Path, at_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.trl.trainer.is_installed", lambda package: package != "vllm")
    with naming(ConfigError, "vLLM", f"{install_extra('vllm')}"):
        trainer_of(policy_dir, use_vllm=True)
    sglang = {f"{ROLLOUT}.name": "sglang"}
    assert trainer_of(policy_dir, use_vllm=True, overrides=sglang).keys[f"{ROLLOUT}.name"] == "sglang"
    assert trainer_of(policy_dir, use_vllm=True, overrides={f"{ROLLOUT}.server_urls": ["http://127.0.0.1:1"]}).keys


def test_an_exception_of_a_tool_is_answered_and_shown(caplog: pytest.LogCaptureFixture) -> None:
    def divide(a: int, b: int) -> float:
        """Divides.

        Args:
            a: The dividend.
            b: The divisor.
        """
        return a / b

    (tool,) = as_tools([divide], 100)
    answers = [asyncio.run(gathered(tool.execute("one", {"a": 1, "b": 0}), [])) for _ in range(3)]
    assert answers == [ToolResponse("{'error': 'division by zero'}")] * 3
    told = [record.getMessage() for record in caplog.records if "divide" in record.getMessage()]
    assert len(told) == 2 and f"ZeroDivisionError: division by zero ({__file__}:" in told[0]


def test_an_argument_may_be_set_later(policy_dir: Path, at_home: Path) -> None:
    args = GRPOConfig("run", **dict[str, Any](SMALL))
    args.learning_rate = 1e-5
    args.chat_template_kwargs = {"enable_thinking": False}
    keys = GRPOTrainer(policy_dir, length, args, ROWS).keys
    assert keys["actor_rollout_ref.actor.optim.lr"] == 1e-5
    assert keys["actor_rollout_ref.model.chat_template_kwargs"] == {"enable_thinking": False}
    with naming(ConfigError, "learning_rat", "'learning_rate'"):
        args.learning_rat = 1e-5


def test_a_callback_ends_the_run(policy_dir: Path, at_home: Path) -> None:
    watching = Watching(stop_at=1)
    trainer = trainer_of(policy_dir, callbacks=[watching], max_steps=5)
    assert trainer.train().global_step == 1
    assert (at_home / "run" / "policy" / "config.json").is_file()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a model object": ({"policy": object()}, "save_pretrained"),
    "a dataset of text": ({"rows": [{"prompt": "The sky is"}]}, r"train_dataset, row 0.*'role': 'user'"),
    "no prompt": ({"rows": [{"question": "2 + 2?"}]}, "expected a column prompt, found question"),
    "images": ({"rows": [{**ROWS[0], "image": b"1"}]}, "column image"),
    "an image as an array": ({"rows": [{**ROWS[0], "image": np.zeros((2, 2, 3))}]}, "column image"),
    "a stream": ({"rows": iter(ROWS)}, r"list\(stream.take"),
    "a missing file": ({"rows": "no/such.parquet"}, r"no such file.*\[hub\]"),
    "too few rows": ({"rows": ROWS[:1], "max_steps": -1}, "train_dataset has 1 rows"),
    "no reward": ({"reward": []}, "reward_funcs is empty"),
    "a reward model": ({"reward": "some/reward-model"}, "reward_model.model.path"),
    "a reward without keywords": ({"reward": lambda completions: [0.0]}, r"def <lambda>\(completions, \*\*kwargs\)"),
    "two rewards of a name": ({"reward": [length, length]}, "two functions are called 'length'"),
    "weights": ({"reward_weights": [1.0, 2.0]}, "2 entries for 1 reward_funcs"),
    "a weight that is no number": ({"reward_weights": ["x"]}, r"reward_weights=\['x'\]"),
    "weights that are no list": ({"reward_weights": 1.0}, "reward_weights=1.0"),
    "one tool": ({"tools": length}, r"tools: expected a list"),
    "a tokenizer that is not there": ({"processing_class": "./none"}, "./none"),
    "bytes": ({"rows": [{"prompt": [{"role": "user", "content": b"1"}]}]}, "train_dataset, row 0.*JSON"),
    "a tool without hints": ({"tools": [3]}, r"tools\[0\]: expected a function"),
    "evaluation without rows": ({"eval_strategy": "steps"}, "without eval_dataset"),
    "a callback of other events": (
        {"callbacks": [type("Mine", (TrainerCallback,), {"on_epoch_end": lambda *_, **__: None})()]},
        "Mine.on_epoch_end",
    ),
}


@pytest.mark.parametrize(
    ("steps", "advice"),
    [
        # gradient_accumulation_steps, steps_per_generation, num_iterations; what to give instead
        ((4, 1, 1), (4, 4, 1)),
        ((4, 2, 2), (2, 2, 1)),
        ((4, 1, 2), (2, 2, 1)),
        ((4, 2, 4), (2, 2, 2)),
    ],
)
def test_optimizer_steps_over_several_generations_name_what_to_give(
    steps: tuple[int, int, int], advice: tuple[int, int, int], policy_dir: Path, at_home: Path
) -> None:
    def given(values: tuple[int, int, int], **more: Any) -> GRPOTrainer:
        names = ("gradient_accumulation_steps", "steps_per_generation", "num_iterations")
        return trainer_of(policy_dir, **dict(zip(names, values, strict=True)), **more)

    accumulated, pieces, passes = advice
    named = f"gradient_accumulation_steps={accumulated}, steps_per_generation={pieces}, num_iterations={passes}"
    with naming(ConfigError, named):
        given(steps)
    keys = given(advice, max_steps=4).keys
    # Distinct trajectories of an optimizer step: of several passes over a generation it sees each trajectory once.
    assert (
        keys["actor_rollout_ref.actor.ppo_mini_batch_size"]
        == accumulated * SMALL["per_device_train_batch_size"] // SMALL["num_generations"]
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_in_words(name: str, policy_dir: Path, at_home: Path) -> None:
    given, says = BAD[name]
    with pytest.raises(UserError, match=f"(?s){says}"):
        trainer_of(**{"policy": policy_dir, **given})
    assert list(at_home.iterdir()) == []


def test_each_epochs_order_is_drawn_once_and_the_same_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    randperm = torch.randperm
    monkeypatch.setattr(torch, "randperm", lambda n, **more: (drawn.append(n), randperm(n, **more))[1])  # type: ignore[func-returns-value]
    order = RepeatOrder(range(7), 7, 3)  # type: ignore[arg-type]
    epochs = [list(order.next_batch()) for _ in range(5)]
    assert len(drawn) == 5
    resumed = RepeatOrder(range(7), 7, 3)  # type: ignore[arg-type]
    for epoch in (3, 1):
        resumed.load_state_dict({"epoch": epoch, "position": 0, "seed": 3})
        assert list(resumed.next_batch()) == epochs[epoch]


def test_a_tokenizer_that_the_run_would_not_have_is_refused(policy_dir: Path, at_home: Path) -> None:
    from transformers import AutoTokenizer

    def given(**changes: object) -> GRPOTrainer:
        tokenizer = AutoTokenizer.from_pretrained(policy_dir)
        for name, value in changes.items():
            setattr(tokenizer, name, value)
        return trainer_of(policy_dir, processing_class=tokenizer)

    given(pad_token="<|im_end|>", padding_side="left")
    for name, value in {"eos_token": "<|im_start|>", "response_template": {"content": {"close": "x"}}}.items():
        with naming(ConfigError, "processing_class", name, policy_dir, "save_pretrained"):
            given(**{name: value})


@pytest.mark.parametrize("field", ["use_rslora", "lora_bias", "ensure_weight_tying", "init_lora_weights"])
def test_a_field_of_a_lora_config_that_does_nothing_here_is_refused(field: str) -> None:
    from peft import LoraConfig

    with naming(ConfigError, "peft_config.r=0"):
        adapter_keys(LoraConfig(r=0, target_modules=["q_proj"]), "qwen2")
    plain = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", lora_dropout=0, modules_to_save=[])
    assert adapter_keys(plain, "qwen2")["actor_rollout_ref.model.lora_rank"] == plain.r
    setattr(plain, field, not getattr(plain, field))
    with naming(ConfigError, f"peft_config.{field}"):
        adapter_keys(plain, "qwen2")


def test_a_config_of_trls_own_is_refused(policy_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"import GRPOConfig from agentrl\.trl"):
        GRPOTrainer(policy_dir, length, {"output_dir": "x"}, ROWS)  # type: ignore[arg-type]
    with naming(ConfigError, "'temperature'"):
        GRPOConfig("run", temprature=1.0)


@pytest.mark.parametrize(
    ("answer", "says"), [([1.0], "4 rewards"), ("good", "found 'good'"), ([1.0, "x", 0, 0], "finite number")]
)
def test_a_reward_that_breaks_the_contract_ends_the_run(
    answer: Any, says: Names, policy_dir: Path, at_home: Path
) -> None:
    def bad(completions: list[Any], **kwargs: Any) -> Any:
        return answer

    with naming(CodeError, says) as caught:
        trainer_of(policy_dir, bad).train()
    assert_names(caught.value, "bad", "test_trainer.py")


def test_rows_come_from_files_and_datasets(policy_dir: Path, at_home: Path) -> None:
    datasets = pytest.importorskip("datasets")
    (at_home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for rows in (datasets.Dataset.from_list(ROWS), "rows.jsonl"):
        trainer = trainer_of(policy_dir, rows=rows)
        file = str(trainer.keys["data.train_files"])
        assert file.startswith("run.data/train-") and trainer._rewards._rows[file][3]["number"] == 3
    others = trainer_of(policy_dir, rows=[*ROWS[1:], ROWS[0]])
    assert others.keys["data.train_files"] != file, "no run changes the rows that another one reads"
    with pytest.raises(DataError, match="no row"):
        trainer_of(policy_dir, rows=[])


def test_a_saved_model_is_of_this_training_and_alone_in_its_folder(policy_dir: Path, at_home: Path) -> None:
    class Saves(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            with naming(TrainingError, "an earlier training, of 1 steps"):
                trainer.save_model("early")
            asked.append(state.global_step)

    asked: list[int] = []
    trainer = trainer_of(policy_dir, max_steps=1)
    with naming(TrainingError, "not there yet"):
        trainer.save_model()
    trainer.train()
    trainer = trainer_of(policy_dir, max_steps=2, callbacks=[Saves()])
    trainer.train(resume_from_checkpoint=True)
    assert asked == [2] and not (at_home / "early").exists()

    for folder in ("new", "new", None):
        trainer.save_model(folder)
        assert (at_home / (folder or "run") / "trained_steps").read_text() == "2\n"
    other = at_home / "other"
    other.mkdir()
    (other / "notes.md").write_text("mine")
    trainer.save_model(other)
    for name in ("model-00001-of-00002.safetensors", "adapter_config.json", "merges.txt"):
        (other / name).write_text("old")
        with naming(TrainingError, ("files of another model", name)):
            trainer.save_model(other)
        (other / name).unlink()


def test_json_lines_are_read_as_they_are_written(tmp_path: Path) -> None:
    """No text becomes a date, no mapping gets another row's names, and no row is too long, as by agentrl's reader."""
    long = [{"role": "user", "content": "x" * 3_000_000}]
    rows: list[dict[str, object]] = [
        {"prompt": long, "answer": "2024-01-05", "info": {"a": 1}},
        {"prompt": ROWS[0]["prompt"], "answer": "2023-11-30", "info": {"b": 2}, "only": 3},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_rows(file, "train_dataset") == [{**rows[0], "only": None}, rows[1]]
    for broken, says in {'{"prompt": [}': "expected JSON", "[1]\n": "a JSON object"}.items():
        file.write_text(broken)
        with pytest.raises(DataError, match=f"train_dataset=.*{says}"):
            read_rows(file, "train_dataset")


def test_two_scripts_may_write_the_same_rows_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, write, numbers = read_data(ROWS, "train_dataset", tmp_path), pq.write_table, iter((1, 2))
    monkeypatch.setattr("os.getpid", lambda: next(numbers))

    def while_another_does(table: Any, file: Path) -> None:
        write(table, file)
        monkeypatch.setattr(pq, "write_table", write)
        data.write()

    monkeypatch.setattr(pq, "write_table", while_another_does)
    data.write()
    assert list(tmp_path.iterdir()) == [data.file] and pq.read_metadata(data.file).num_rows == len(ROWS)


def test_another_run_never_enters_the_door() -> None:
    """No other room imports agentrl/trl."""
    words = re.compile(r"^\s*(from|import) agentrl\.trl\b", re.MULTILINE)
    files = [file for file in (PROJECT / "agentrl").rglob("*.py") if "trl" not in file.parts]
    assert not [file for file in files if words.search(file.read_text())]
