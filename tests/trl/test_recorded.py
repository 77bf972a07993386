"""The door's numbers against those of TRL 1.16 itself, recorded by `benchmarks/trl/record.py`."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig

from agentrl.algorithms.advantages import compute_advantages
from agentrl.algorithms.aggregate import LossScale, Scored, add_up
from agentrl.algorithms.terms import loss_terms
from agentrl.checks.optimizer_step import rate
from agentrl.config.columns import OF_SCORER
from agentrl.config.overrides import as_config
from agentrl.config.sections.training import Config
from agentrl.errors import ConfigError
from agentrl.model.scores import TokenScores
from agentrl.optim.schedule import lr_factor
from agentrl.trajectory.batch import RaggedBatch
from agentrl.trl.adapters import adapter_keys
from agentrl.trl.arguments import BY_NAME
from agentrl.trl.order import RepeatOrder
from agentrl.trl.translation import Arguments, batch_sizes, frequency, total_steps, translate
from benchmarks.trl.page import table
from benchmarks.trl.published import CONFIGS
from benchmarks.trl.record import (
    MANY_ROWS,
    ROWS,
    TRAJECTORIES,
    UPDATE,
    fill,
    page_script,
    rewards_of,
    sequences,
    updated_policy,
)
from tests.algorithms.batches import Row, batch_of
from tests.conftest import PROJECT
from tests.naming import assert_names, naming
from tests.trained import trained_batch
from tests.workers.conftest import fsdp
from tests.workers.made import policy_worker

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded.json").read_text())
RUN = {"per_device_train_batch_size": 8, "num_generations": TRAJECTORIES, "learning_rate": 1e-4, "bf16": False}
LOSSES = RECORDED["losses"] | {
    name: RECORDED["published"][name]["loss"] for name, config in CONFIGS.items() if not config.refused
}
TOO_FEW = ("Dr. GRPO", "INTELLECT-2", "ScaleRL")
"""Published configs whose generation holds no whole group in one process, which TRL refuses, too."""
LATER = {
    *("max_prompt_length", "warmup_ratio", "group_by_length", "logging_dir", "overwrite_output_dir", "use_liger_loss"),
    *("wandb_log_unique_prompts", "vllm_guided_decoding_regex", "vllm_device", "vllm_dtype"),
    "vllm_enable_prefix_caching",
}
"""Arguments of the table that TRL 1.16 does not have: they are of other releases."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 2048}')
    return tmp_path


def config_of(arguments: dict[str, Any], model: Path) -> Config:
    keys = translate({**RUN, **arguments}, model=model, rows=ROWS)
    names = {"weights": {"first": 1.0, "second": 1.0}}
    more = {"algorithm.adv_options": names} if str(keys["algorithm.adv_estimator"]).endswith("by_reward") else {}
    return as_config({**keys, **more, "data.train_files": "rows.parquet", "data.val_files": None})


def with_numbers(batch: RaggedBatch, numbers: list[dict[str, float]]) -> RaggedBatch:
    names = {name for one in numbers for name in one}
    columns = {name: [one.get(name, math.nan) for one in numbers] for name in names}
    return batch.with_fields(**{OF_SCORER + name: torch.tensor(one).double() for name, one in columns.items()})


def test_every_argument_has_an_entry_and_trls_default() -> None:
    assert set(BY_NAME) - set(RECORDED["defaults"]) == LATER
    found = {name: BY_NAME[name].default for name in RECORDED["defaults"]}
    assert found == RECORDED["defaults"]


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_steps_rates_and_prompts_are_trls(name: str, model: Path) -> None:
    recorded = RECORDED["runs"][name]
    config = config_of(recorded["arguments"], model)
    steps, actor = config.trainer.total_training_steps, config.actor_rollout_ref.actor
    assert steps is not None
    updates = -(-config.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
    assert steps * updates == recorded["steps"]
    assert actor.optim.lr_by_mini_batch == (updates > 1)
    places = [step + place / updates for step in range(1, steps + 1) for place in range(updates)]
    for factor in (lr_factor, rate):
        rates = [actor.optim.lr * factor(actor.optim, place, steps) for place in places]
        assert rates == pytest.approx(recorded["rates"])
    order = RepeatOrder(range(ROWS), config.data.train_batch_size, config.data.seed)  # type: ignore[arg-type]
    if config.data.sampler.name is None:
        assert not config.data.shuffle
        taken = [list(range(start, start + 2)) for start in range(0, 2 * steps, 2)]
    else:
        taken = [list(order.next_batch()) for _ in range(steps)]
    generated = [row for generation in recorded["generations"] for row in generation]
    assert [row for batch in taken for row in batch] == generated


@pytest.mark.parametrize(
    ("rows", "length"),
    [(10, {"max_steps": 600}), (10, {"num_train_epochs": 60}), (10, {"num_train_epochs": 2.5}), (11, {})],
)
def test_an_epoch_is_a_pass_over_the_rows_however_the_length_is_given(rows: int, length: dict[str, float]) -> None:
    kinds = ("save", "eval", "logging")
    arguments = Arguments({**RUN, **length, **{f"{kind}_strategy": "epoch" for kind in kinds}})
    batches = batch_sizes(arguments)
    steps = total_steps(arguments, batches, rows)
    assert [frequency(arguments, kind, batches, rows, steps) for kind in kinds] == [5, 5, 5]
    assert not arguments.faults


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("max_steps", 2.5), ("seed", 1.5), ("num_train_epochs", 0), ("warmup_ratio", 1.5), ("warmup_steps", -1)),
        *(("learning_rate", math.nan), ("num_generations", math.inf), ("shuffle_dataset", "false")),
    ],
)
def test_a_value_that_would_be_read_as_another_one_is_refused(name: str, value: object, model: Path) -> None:
    with naming(ConfigError, f"{name}={value!r}"):
        translate({**RUN, "max_steps": -1, name: value}, model=model, rows=ROWS)


def test_reports_to_all_are_reports_to_the_packages_that_are_installed(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.trl.translation.is_installed", lambda package: package in ("wandb", "mlflow"))
    for given, loggers in (("all", ["wandb", "mlflow"]), (["mlflow", "all"], ["mlflow", "wandb"]), ("none", [])):
        assert config_of({"report_to": given}, model).trainer.logger == ["console", "jsonl", *loggers]


def test_no_steps_between_two_is_never_for_checkpoints_and_refused_elsewhere() -> None:
    arguments = Arguments({**RUN, "save_steps": 0, "eval_strategy": "steps", "eval_steps": 0, "logging_steps": 2})
    batches = batch_sizes(arguments)
    found = [frequency(arguments, kind, batches, ROWS, 6) for kind in ("save", "eval", "logging")]
    assert found[0] == -1 and found[1] == found[2] > 0 and not arguments.faults
    arguments.given = {**arguments.given, "logging_steps": 0}
    frequency(arguments, "logging", batches, ROWS, 6)
    assert_names("".join(arguments.faults), "logging_steps=0")


def test_vllms_longest_context_is_taken_over_with_vllm_alone(model: Path) -> None:
    def lengths(**given: Any) -> tuple[Any, Any]:
        keys = translate({**RUN, "max_completion_length": 512, **given}, model=model, rows=ROWS)
        return keys["data.max_prompt_length"], keys.get("actor_rollout_ref.rollout.max_model_len")

    assert lengths(vllm_max_model_length=1024) == (2048 - 512, None)
    assert lengths(vllm_max_model_length=1024, use_vllm=True) == (512, 1024)
    assert lengths(vllm_max_model_length=1024, use_vllm=True, max_prompt_length=500) == (500, 1024)
    assert lengths(use_vllm=True, max_prompt_length=500) == (500, None)
    with pytest.raises(ConfigError, match=r"vllm_max_model_length=1024: give .* \(600 \+ 512\) or more"):
        lengths(vllm_max_model_length=1024, use_vllm=True, max_prompt_length=600)


@pytest.mark.parametrize("name", RECORDED["runs"])
def test_advantages_are_trls(name: str, model: Path) -> None:
    recorded = RECORDED["runs"][name]
    config = config_of(recorded["arguments"], model)
    weights = recorded["arguments"].get("reward_weights", [1.0, 1.0])
    pairs = zip(recorded["generations"], recorded["advantages"], strict=False)
    for rows, theirs in list(pairs)[: 1 if "accumulated" in name else None]:
        scores, numbers = [], []
        for row in rows:
            for number in range(TRAJECTORIES):
                pair = rewards_of(row, number)
                scores.append(sum(weight * one for weight, one in zip(weights, pair, strict=True) if one is not None))
                named = zip(("rewards/first", "rewards/second"), pair, strict=True)
                numbers.append({key: one for key, one in named if one is not None})
        sequences = [Row("0110", {2: score}, place // TRAJECTORIES) for place, score in enumerate(scores)]
        batch = with_numbers(batch_of(*sequences), numbers)
        found = compute_advantages(batch, config.algorithm, TRAJECTORIES).advantages
        assert found is not None
        assert found.reshape(-1, 4)[:, 1].tolist() == pytest.approx(theirs, abs=2e-5)


def test_a_trajectory_without_any_reward_takes_no_part(model: Path) -> None:
    """TRL's NaN: no part in mean and deviation, and advantage 0."""
    config = config_of({}, model)
    rows = [Row("0110", {2: score}, 0) for score in (1.0, 0.0, 0.0, 2.0)]
    numbers: list[dict[str, float]] = [{}, {"unscored": 1.0}, {}, {}]
    found = compute_advantages(with_numbers(batch_of(*rows), numbers), config.algorithm, 4).advantages
    assert found is not None
    assert found.reshape(-1, 4)[:, 1].tolist() == pytest.approx([0.0, 0.0, -1 / 1.0001, 1 / 1.0001])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_config_is_translated_or_refused_in_words(
    name: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, length and rates of those that are translated are TRL's; what TRL refuses is refused here, too."""
    (model / "config.json").write_text('{"max_position_embeddings": 65536}')
    monkeypatch.setattr("agentrl.config.installed.is_installed", lambda package: True)
    config, recorded = CONFIGS[name], RECORDED["published"][name]
    assert ("divisible by num_generations" in recorded.get("error", "")) == (name in TOO_FEW)
    if config.refused:
        with pytest.raises(ConfigError) as caught:
            translate(config.arguments, model=model, rows=MANY_ROWS)
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == len(config.refused)
        for line, (argument, words) in zip(lines, config.refused.items(), strict=True):
            assert argument in line and words in line
        return
    keys = translate(config.arguments, model=model, rows=MANY_ROWS)
    names = {"algorithm.adv_options": {"weights": {"first": 1.0}}} if name == "GDPO" else {}
    found = as_config({**keys, **names, "data.train_files": "rows.parquet", "data.val_files": None})
    actor, prompts = found.actor_rollout_ref.actor, found.data.train_batch_size
    assert prompts * found.actor_rollout_ref.rollout.n == recorded["trajectories"]
    updates = -(-prompts // actor.ppo_mini_batch_size) * actor.ppo_epochs
    assert updates == recorded["optimizer_steps"]
    steps = found.trainer.total_training_steps
    assert steps is not None and steps * updates == recorded["steps"]
    places = [1 + place // updates + place % updates / updates for place in range(len(recorded["rates"]))]
    rates = [actor.optim.lr * lr_factor(actor.optim, place, steps) for place in places]
    assert rates == pytest.approx(recorded["rates"])


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients_are_trls(name: str, model: Path) -> None:
    recorded = LOSSES[name]
    arguments, table = dict(recorded["arguments"]), RECORDED["table"]
    on_policy = arguments.pop("on_policy", False)
    given = {**arguments, "per_device_train_batch_size": 4, "max_completion_length": 6, "max_steps": 1}
    config = config_of(given, model)
    actor = config.actor_rollout_ref.actor
    lengths = [sum(row) for row in table["completion_mask"]]

    def ragged(column: str) -> torch.Tensor:
        rows = zip(table[column], lengths, strict=True)
        return torch.tensor([value for row, length in rows for value in row[:length]], dtype=torch.float64)

    mask, offsets = ragged("tool_mask").bool(), torch.tensor([0, *lengths]).cumsum(0)
    owner = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    logprobs, entropy = ragged("logprobs").requires_grad_(), ragged("entropies").requires_grad_()
    batch = trained_batch(
        offsets,
        torch.zeros(len(mask), dtype=torch.int64),
        mask,
        torch.zeros(4, dtype=torch.int64),
        advantages=torch.tensor(table["advantages"], dtype=torch.float64)[owner],
        old_logprobs=ragged("logprobs" if on_policy else "old"),
        ref_logprobs=ragged("ref"),
    )
    scale = LossScale.from_policy_tokens(batch.policy_tokens, actor.loss_agg_mode, config.data.max_response_length)
    terms = loss_terms(actor, config.algorithm, None, ())
    scored = Scored(batch, TokenScores(logprobs, entropy=entropy), torch.where(mask, logprobs, 0.0))
    loss, _, _ = add_up(terms, scored, scale, {})
    loss.backward()
    assert loss.item() == pytest.approx(recorded["loss"], rel=1e-6)
    assert logprobs.grad is not None
    for found, theirs in ((logprobs.grad, "gradient"), (entropy.grad, "entropy_gradient")):
        kept = torch.tensor([value for row, n in zip(recorded[theirs], lengths, strict=True) for value in row[:n]])
        ours = torch.zeros_like(logprobs) if found is None else found
        assert ours.tolist() == pytest.approx(kept.tolist(), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("name", RECORDED["updates"])
def test_weights_after_updates_are_trls(name: str, tmp_path: Path) -> None:
    """The optimizer's steps on given tokens: gradient, clipping, schedule, decay, and peft's adapters."""
    recorded = RECORDED["updates"][name]
    given = {name: value for name, value in recorded["arguments"].items() if name != "lora"}
    updated_policy(tmp_path)
    keys = translate({**UPDATE, **given}, model=tmp_path, rows=1)
    if "lora" in recorded["arguments"]:
        keys |= adapter_keys(LoraConfig(**recorded["arguments"]["lora"]), "qwen2")
    config = as_config({**keys, "data.train_files": "rows.parquet", "data.val_files": None})
    steps = config.trainer.total_training_steps
    assert steps is not None and steps == given["max_steps"]
    worker = policy_worker(
        config.actor_rollout_ref.model,
        config.actor_rollout_ref.actor,
        device="cpu",
        temperature=1.0,
        log_prob_max_tokens=4096,
        total_steps=steps,
        seed=1,
    )
    trained = fsdp(worker).params
    assert set(trained) == set(recorded["after"])
    fill(trained)
    values = sequences()
    whole = torch.cat([values["prompt_mask"], values["completion_mask"]], 1).bool()
    ids = torch.cat([values["prompt_ids"], values["completion_ids"]], 1)[whole]
    mask = torch.cat([torch.zeros_like(values["prompt_mask"]), values["tool_mask"]], 1)[whole].bool()
    lengths = whole.sum(1)
    batch = trained_batch(
        torch.tensor([0, *lengths.cumsum(0).tolist()]),
        ids,
        mask,
        torch.zeros(len(lengths), dtype=torch.int64),
        advantages=torch.repeat_interleave(values["advantages"], lengths) * mask,
    )
    for step, norm in enumerate(recorded["norms"], start=1):
        assert worker.update(batch, step=step)["actor/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for one, (total, size) in recorded["after"].items():
        found = trained[one].detach().double()
        assert [found.sum().item(), found.abs().sum().item()] == pytest.approx([total, size], rel=1e-5, abs=1e-4)


def test_trl_ran_the_script_of_the_page_with_its_own_import() -> None:
    assert hashlib.sha256(page_script().encode()).hexdigest() == RECORDED["script"]["sha256"]
    theirs = {"reward", "reward_std", "rewards/correct/mean", "rewards/calls/mean", "learning_rate", "calls"}
    assert theirs <= set(RECORDED["script"]["names"])


def test_the_page_has_the_table_of_all_arguments() -> None:
    assert table() in (PROJECT / "docs" / "trl.md").read_text()
