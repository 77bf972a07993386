"""Record the numbers of TRL's own `GRPOTrainer`, with which `tests/trl/` compares agentrl's.

    python -m venv trl && trl/bin/pip install torch trl==1.16.0
    trl/bin/pip install peft
    trl/bin/python -m benchmarks.trl.record POLICY tests/trl/recorded.json

Run it in an environment with TRL and without agentrl's packages; POLICY is the folder of a tiny policy. A run's numbers
depend on no sampled token: rewards are given by row, log-probs by a table, and updates have given tokens and weights.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

from benchmarks.trl.published import CONFIGS, Published

RUNS: dict[str, dict[str, Any]] = {
    "linear, three epochs": {"num_train_epochs": 3.0, "lr_scheduler_type": "linear"},
    "warm-up of three steps": {"max_steps": 7, "warmup_steps": 3},
    "warm-up by a part": {"max_steps": 8, "warmup_steps": 0.3, "lr_scheduler_type": "cosine"},
    "constant, no shuffling": {"max_steps": 3, "lr_scheduler_type": "constant", "shuffle_dataset": False},
    "several steps a generation": {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "num_iterations": 2,
        "max_steps": 8,
        "lr_scheduler_type": "constant",
        "loss_type": "grpo",
    },
    "GSPO as TRL's page of papers has it": {
        "importance_sampling_level": "sequence",
        "loss_type": "grpo",
        "beta": 0.0,
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "gradient_accumulation_steps": 1,
        "steps_per_generation": 4,
        "num_train_epochs": 3.0,
    },
    "warm-up that ends in a generation": {
        "per_device_train_batch_size": 4,
        "steps_per_generation": 2,
        "max_steps": 8,
        "warmup_steps": 3,
        "lr_scheduler_type": "cosine",
        "loss_type": "grpo",
    },
    "accumulated": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "num_train_epochs": 1.5},
    "scaled by batch": {"max_steps": 2, "scale_rewards": "batch"},
    "not scaled": {"max_steps": 2, "scale_rewards": "none"},
    "normalised, then summed": {"max_steps": 2, "multi_objective_aggregation": "normalize_then_sum"},
    "weighed": {"max_steps": 2, "reward_weights": [0.5, 2.0]},
}
"""Arguments of the runs, over those in `run`."""
ROWS, TRAJECTORIES = 11, 4
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"loss_type": "grpo"},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "bnpo": {"loss_type": "bnpo"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "gspo by tokens": {"loss_type": "dapo", "importance_sampling_level": "sequence"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "two-sided clip": {"loss_type": "grpo", "delta": 1.5},
    "kl": {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    "kl, corrected, on policy": {"loss_type": "dapo", "beta": 0.1, "on_policy": True},
    "entropy": {"loss_type": "dapo", "entropy_coef": 0.05},
}
"""Arguments of the losses. on_policy: the old log-probs are the policy's."""
UPDATES: dict[str, dict[str, Any]] = {
    "all weights": {"max_steps": 3},
    "weight decay": {"max_steps": 3, "weight_decay": 0.1},
    "LoRA of two layers": {"max_steps": 3, "lora": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}},
    "LoRA of all layers, decayed": {
        "max_steps": 3,
        "weight_decay": 0.1,
        "lora": {"r": 2, "lora_alpha": 16, "target_modules": "all-linear"},
    },
    "LoRA of the family's own layers": {"max_steps": 3, "loss_type": "grpo", "lora": {"r": 4, "lora_alpha": 4}},
}
"""Arguments of the updates. lora: of peft's LoraConfig."""
PROMPT, COMPLETION = 3, 5
"""Tokens of each prompt and each completion of an update."""


UPDATE: dict[str, Any] = {
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": COMPLETION,
    "learning_rate": 1e-2,
    "save_strategy": "no",
    "bf16": False,
    "use_cpu": True,
    "gradient_checkpointing": False,
    "report_to": "none",
}
"""Arguments of all updates."""


def rewards_of(row: int, number: int) -> tuple[float, float | None]:
    """Give a trajectory its rewards by two functions; the second is not applicable to some."""
    first = (7 * row + 3 * number) % 5 / 4
    return first, None if (row + number) % 3 == 0 else float((row * number) % 4)


class Recorder(TrainerCallback):
    """Learning rates of the optimizer steps."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if "learning_rate" in logs:
            self.rates.append(logs["learning_rate"])


def trainer_of(policy: str, folder: str, arguments: dict[str, Any], functions: Any, callback: Recorder) -> Any:
    from trl import GRPOConfig, GRPOTrainer  # only here: tests read the tables above without TRL

    fixed = {
        "per_device_train_batch_size": 8,
        "num_generations": TRAJECTORIES,
        "max_completion_length": 4,
        "learning_rate": 1e-4,
        "logging_steps": 1,
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "gradient_checkpointing": False,
        "report_to": "none",
    }
    rows = [{"prompt": [{"role": "user", "content": f"row {row}"}], "row": row} for row in range(ROWS)]
    return GRPOTrainer(
        model=policy,
        reward_funcs=functions,
        args=GRPOConfig(output_dir=folder, **{**fixed, **arguments}),
        train_dataset=Dataset.from_list(rows),
        callbacks=[callback],
    )


def run(policy: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Train; return the rows of each generation, the advantages, the rates and the number of optimizer steps."""
    generations: list[list[int]] = []

    def first(row: list[int], **kwargs: Any) -> list[float]:
        generations.append(row[::TRAJECTORIES])
        return [rewards_of(one, place % TRAJECTORIES)[0] for place, one in enumerate(row)]

    def second(row: list[int], **kwargs: Any) -> list[float | None]:
        return [rewards_of(one, place % TRAJECTORIES)[1] for place, one in enumerate(row)]

    callback = Recorder()
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(policy, folder, arguments, [first, second], callback)
        advantages: list[list[float]] = []
        compute = trainer._generate_and_score_completions

        def computed(inputs: Any) -> Any:
            found = compute(inputs)
            advantages.append(found["advantages"].tolist())
            return found

        trainer._generate_and_score_completions = computed
        trainer.train()
    return {
        "arguments": arguments,
        "generations": generations,
        "advantages": advantages,
        "rates": callback.rates,
        "steps": trainer.state.global_step,
    }


def table() -> dict[str, torch.Tensor]:
    """Make log-probs, masks and advantages of 4 sequences of up to 6 tokens."""
    generator = torch.Generator().manual_seed(1)
    shape = (4, 6)
    logprobs = -3 * torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "logprobs": logprobs,
        "old": logprobs + 0.5 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "ref": logprobs + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64),
        "entropies": 2 * torch.rand(shape, generator=generator, dtype=torch.float64),
        "completion_mask": torch.tensor([[1] * 6, [1] * 3 + [0] * 3, [1] * 5 + [0], [1] * 4 + [0] * 2]),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1], [1] * 6, [1, 0, 1, 1, 1, 1], [1] * 6]),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -0.9], dtype=torch.float64),
    }


def loss(policy: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Compute TRL's loss of the table, and its gradient by log-prob."""
    given = {name: value for name, value in arguments.items() if name != "on_policy"}
    given |= {"per_device_train_batch_size": 4, "max_completion_length": 6}
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(policy, folder, given, lambda completions, **kwargs: [0.0] * len(completions), Recorder())
    values = table()
    logprobs = values["logprobs"].clone().requires_grad_()
    entropies = values["entropies"].clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (logprobs, entropies, None)
    trainer.current_gradient_accumulation_steps = 1
    mask = values["completion_mask"]
    inputs = {
        "prompt_ids": torch.zeros((4, 1), dtype=torch.long),
        "prompt_mask": torch.ones((4, 1), dtype=torch.long),
        "completion_ids": torch.zeros_like(mask),
        "completion_mask": mask,
        "tool_mask": values["tool_mask"],
        "advantages": values["advantages"],
        "old_per_token_logps": None if arguments.get("on_policy") else values["old"],
        "ref_per_token_logps": values["ref"],
        "num_items_in_batch": (mask * values["tool_mask"]).sum(),
    }
    found = trainer._compute_loss(trainer.model, inputs)
    found.backward()
    assert logprobs.grad is not None
    entropy_grad = torch.zeros_like(entropies) if entropies.grad is None else entropies.grad
    return {
        "arguments": arguments,
        "loss": found.item(),
        "gradient": logprobs.grad.tolist(),
        "entropy_gradient": entropy_grad.tolist(),
    }


def updated_policy(folder: Path) -> None:
    """Write a policy for `UPDATES`, without a tokenizer."""
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=96,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = Qwen2ForCausalLM(config)
    fill(dict(model.named_parameters()))
    model.save_pretrained(folder)


def fill(parameters: Mapping[str, torch.Tensor]) -> None:
    """Set parameters to values that depend on their names and shapes alone; norms are close to 1."""
    with torch.no_grad():
        for name, one in parameters.items():
            waves = torch.sin(torch.arange(one.numel(), dtype=torch.float64) * 1.7 + len(name))
            one.copy_((0.2 * waves + float("norm" in name)).reshape(one.shape))


def sequences() -> dict[str, torch.Tensor]:
    """Make tokens, masks and advantages of 4 sequences of one prompt."""
    ids = (torch.arange(4 * COMPLETION) * 37 % 90 + 3).reshape(4, COMPLETION)
    mask = torch.tensor([[1] * 5, [1] * 3 + [0] * 2, [1] * 4 + [0], [1] * 5])
    return {
        "prompt_ids": (torch.arange(PROMPT) + 5).repeat(4, 1),
        "prompt_mask": torch.ones((4, PROMPT), dtype=torch.long),
        "completion_ids": ids,
        "completion_mask": mask,
        "tool_mask": torch.tensor([[1, 1, 0, 1, 1], [1] * 5, [1, 0, 1, 1, 1], [1] * 5]),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -0.9]),
    }


def update(policy: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Take TRL's optimizer steps on given sequences; return the sums of each trained parameter and of its size."""
    from peft import LoraConfig
    from transformers import AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    given = {name: value for name, value in arguments.items() if name != "lora"}
    adapters = LoraConfig(task_type="CAUSAL_LM", **arguments["lora"]) if "lora" in arguments else None
    with tempfile.TemporaryDirectory() as folder:
        updated_policy(Path(folder))
        trainer = GRPOTrainer(
            model=folder,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=GRPOConfig(output_dir=folder, **{**UPDATE, **given}),
            train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": "x"}]}]),
            processing_class=AutoTokenizer.from_pretrained(policy),
            peft_config=adapters,
        )
    trained = {name: one for name, one in trainer.model.named_parameters() if one.requires_grad}
    fill({name.removeprefix("base_model.model."): one for name, one in trained.items()})
    trainer.create_optimizer_and_scheduler(arguments["max_steps"])
    trainer.current_gradient_accumulation_steps = 1
    values = sequences()
    inputs = {
        **values,
        "old_per_token_logps": None,
        "num_items_in_batch": (values["completion_mask"] * values["tool_mask"]).sum(),
    }
    norms: list[float] = []
    for _ in range(arguments["max_steps"]):
        trainer.optimizer.zero_grad()
        trainer._compute_loss(trainer.model, inputs).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), trainer.args.max_grad_norm)))
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
    after = {
        name.removeprefix("base_model.model."): [one.double().sum().item(), one.double().abs().sum().item()]
        for name, one in trained.items()
    }
    return {"arguments": arguments, "norms": norms, "after": after}


OF_RUNS = ("output_dir", "report_to", "push_to_hub", "optim", "trackio_space_id", "use_vllm", "use_liger_kernel")
"""Arguments that need packages, accounts or GPUs, and change none of the recorded numbers."""
OF_LOSSES = (
    *("loss_type", "importance_sampling_level", "epsilon", "epsilon_high", "delta", "beta", "use_bias_correction_kl"),
    *("sapo_temperature_pos", "sapo_temperature_neg"),
)
SMALLER = {
    "per_device_train_batch_size=32": "per_device_train_batch_size=8",
    "num_generations=8": "num_generations=4",
    "max_completion_length=256": "max_completion_length=16",
    "max_steps=20": "max_steps=1, use_cpu=True",
}
"""Replacements that make the script of the page smaller."""
MANY_ROWS = 700
"""Rows of the data set of the published configs."""


def published(policy: str, config: Published) -> dict[str, Any]:
    """Make TRL's trainer of a published config; return its sizes, its rates and its loss, or TRL's own refusal."""
    given = {name: value for name, value in config.arguments.items() if name not in OF_RUNS}
    given = {name: value for name, value in given.items() if not name.startswith(("vllm_", "transformers_"))}
    given |= {"bf16": False, "use_cpu": True, "report_to": "none", "use_transformers_continuous_batching": False}
    rows = [{"prompt": [{"role": "user", "content": f"row {row}"}]} for row in range(MANY_ROWS)]
    from trl import GRPOConfig, GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        try:
            args = GRPOConfig(output_dir=folder, **given)
        except ValueError as error:
            return {"error": str(error)}
        trainer = GRPOTrainer(
            model=policy,
            reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
            args=args,
            train_dataset=Dataset.from_list(rows),
        )
        steps = trainer.set_initial_training_values(args, trainer.get_train_dataloader())[-1]
        trainer.create_optimizer_and_scheduler(steps)
        rates = []
        for _ in range(min(steps, 20)):
            rates.append(trainer.lr_scheduler.get_last_lr()[0])
            trainer.optimizer.step()
            trainer.lr_scheduler.step()
    found = {
        "trajectories": args.generation_batch_size,
        "optimizer_steps": args.steps_per_generation * args.num_iterations / args.gradient_accumulation_steps,
        "steps": steps,
        "rates": rates,
    }
    of_loss = {name: config.arguments[name] for name in OF_LOSSES if name in config.arguments}
    if of_loss.get("beta"):
        of_loss["on_policy"] = found["optimizer_steps"] == 1
    return found | {"loss": loss(policy, of_loss)}


def page_script() -> str:
    """Return the first script of docs/trl.md as it is for TRL: with the import that its comment names."""
    page = (Path(__file__).parents[2] / "docs" / "trl.md").read_text(encoding="utf-8")
    script = page.partition("```python\n")[2].partition("```")[0]
    ours, theirs = "from agentrl.trl import", "from trl import"
    if script.count(ours) != 1:
        raise SystemExit(f"docs/trl.md: expected one line `{ours}` in the first script")
    return script.replace(ours, theirs)


def ran_script(policy: str) -> dict[str, Any]:
    """Run the script of the page with TRL, smaller; return the script's digest, and the names in TRL's history."""
    import trl

    script = page_script()
    for was, now in SMALLER.items():
        if was not in script:
            raise SystemExit(f"docs/trl.md: {was} is not in the first script")
        script = script.replace(was, now)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(policy, f"{folder}/policy")
        template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"  # TRL trains with tools by known ones
        shutil.copy(template, f"{folder}/policy/chat_template.jinja")
        Path(folder, "multiply.py").write_text(script)
        subprocess.run([sys.executable, "multiply.py", "policy"], cwd=folder, check=True)
        state = json.loads(Path(folder, "multiply", "checkpoint-1", "trainer_state.json").read_text())
    digest = hashlib.sha256(page_script().encode()).hexdigest()
    return {"sha256": digest, "names": sorted(state["log_history"][0])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policy", metavar="POLICY", help="folder of a tiny policy")
    parser.add_argument("out", metavar="FILE", type=Path, help="file to write")
    asked = parser.parse_args()
    import trl
    from trl import GRPOConfig

    policy = asked.policy
    defaults = {
        field.name: field.default if field.default is not dataclasses.MISSING else []
        for field in dataclasses.fields(GRPOConfig)
        if field.init
    }
    found = {
        "trl": trl.__version__,
        "defaults": json.loads(json.dumps(defaults, default=lambda value: getattr(value, "value", str(value)))),
        "table": {name: value.tolist() for name, value in table().items()},
        "runs": {name: run(policy, arguments) for name, arguments in RUNS.items()},
        "script": ran_script(policy),
        "updates": {name: update(policy, arguments) for name, arguments in UPDATES.items()},
        "published": {name: published(policy, config) for name, config in CONFIGS.items()},
        "losses": {name: loss(policy, arguments) for name, arguments in LOSSES.items()},
    }
    lines = [f" {json.dumps(name)}: {_pretty(value)}" for name, value in found.items()]
    asked.out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _pretty(value: Any) -> str:
    """Write JSON with a line for each entry of a mapping."""
    if not isinstance(value, dict):
        return json.dumps(value)
    return "{\n" + ",\n".join(f"  {json.dumps(name)}: {json.dumps(one)}" for name, one in value.items()) + "\n }"


if __name__ == "__main__":
    main()
