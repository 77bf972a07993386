"""The table of verl's keys, against the keys and defaults of its releases, and its dialect."""

from __future__ import annotations

import csv
import fnmatch
import itertools
import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.config.keys import flatten, leaf_keys
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.verl.keys.entries import Values
from agentrl.verl.keys.families import base_defaults
from agentrl.verl.keys.table import VERL_KEYS
from agentrl.verl.keys.translation import entry_of, known_keys, translate
from benchmarks.verl.page import BEGIN, PAGE, page
from tests.naming import assert_names, naming

TRAINERS = [
    f"{release}/{name}" for release in ("0.9.1", "0.7.1") for name in ("fsdp", "megatron", "veomni", "torchtitan")
]
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
pytestmark = pytest.mark.usefixtures("sglang_installed")


@cache
def rows() -> list[dict[str, str]]:
    with (Path(__file__).parent / "defaults.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def defaults_of(trainer: str) -> dict[str, JSON]:
    """Return the composed config of one of verl's trainers, by dotted path."""
    return {row["key"]: json.loads(row["default"]) for row in rows() if trainer in row["trainers"].split()}


# Keys of recipes, of asynchronous trainers and of Search-R1's fork, which are in no generated config.
FURTHER = [
    "reward_model.overlong_buffer.enable",
    "reward_model.overlong_buffer.len",
    "reward_model.overlong_buffer.penalty_factor",
    "reward_model.reward_kwargs.overlong_buffer_cfg.enable",
    "reward.reward_kwargs.overlong_buffer_cfg.len",
    "reward.reward_kwargs.max_resp_len",
    "async_training.staleness_threshold",
    "async_training.trigger_parameter_sync_step",
    "async_training.require_batches",
    "async_training.partial_rollout",
    "rollout.nnodes",
    "rollout.n_gpus_per_node",
    "rollout.n",
    "rollout.total_rollout_steps",
    "rollout.total_epochs",
    "rollout.test_freq",
    "actor_rollout_ref.actor.use_rollout_log_probs",
    "actor_rollout_ref.rollout.standalone_gpu_memory_utilization",
    "data.train_data_num",
    "data.val_data_num",
    "data.max_start_length",
    "data.max_obs_length",
    "data.shuffle_train_dataloader",
    "actor_rollout_ref.actor.state_masking",
    "actor_rollout_ref.rollout.n_agent",
    "algorithm.no_think_rl",
    "algorithm.state_masking.start_state_marker",
    "max_turns",
    "do_search",
    "retriever.url",
    "retriever.topk",
    "reward_model.structure_format_score",
    "reward_model.micro_batch_size",
    "algorithm.rollout_correction.rollout_rs_threshold_lower",
    "algorithm.rollout_correction.rollout_token_veto_threshold",
    f"{ACTOR}.tis_imp_ratio_cap",
]


@pytest.mark.parametrize("trainer", TRAINERS)
def test_no_key_of_a_release_is_unknown_and_no_default_is_refused(trainer: str) -> None:
    found = translate(defaults_of(trainer), Config)
    assert found.strangers == []
    assert found.unsupported == {}


def test_the_keys_of_recipes_and_forks_are_known() -> None:
    known = leaf_keys(Config)
    assert [key for key in FURTHER if entry_of(key) is None and key not in known] == []


def test_every_entry_is_reached() -> None:
    """An entry behind a wider pattern would be dead, and say what is not so."""
    patterns = [entry.pattern for entry in VERL_KEYS]
    assert len(set(patterns)) == len(patterns)
    keys = {entry.pattern: entry.pattern.replace("*", "x") for entry in VERL_KEYS}
    first = {key: next(entry.pattern for entry in VERL_KEYS if entry.matches(key)) for key in keys.values()}
    assert [pattern for pattern, key in keys.items() if first[key] != pattern] == []


MISSPELLED = [
    f"{ACTOR}.megatron.tensor_model_paralel_size",
    f"{ACTOR}.megatron.override_transformer_confg.recompute_granularity",
    f"{ACTOR}.ppo_micro_batch_size_per_gpus",
    f"{ACTOR}.checkpoint.save_content",
    f"{ROLLOUT}.trace.backendd",
    f"{ROLLOUT}.checkpoint_engine.backends",
    "critic.model.lora_ranks",
    "trainer.v1.trainer_modes",
    "distillation.enable",
    "algorithm.filter_groups.max_num_gen_batch",
    "algorithm.rollout_correction.rollout_iss",
]


@pytest.mark.parametrize("key", MISSPELLED)
def test_a_misspelled_key_is_unknown_though_a_pattern_fits_it(key: str) -> None:
    assert translate({key: 1}, Config).strangers == [key]


def test_sections_that_take_any_key_take_any() -> None:
    for key in (
        f"{ACTOR}.megatron.override_transformer_config.anything_at_all",
        f"{ROLLOUT}.engine_kwargs.vllm.anything",
        "ray_kwargs.ray_init.runtime_env.env_vars.MINE",
    ):
        assert translate({key: 1}, Config).strangers == []


def test_a_misspelled_key_is_told_with_verls_own() -> None:
    with naming(ConfigError, "megatron.tensor_model_parallel_size"):
        load_config([f"+{MISSPELLED[0]}=2"], "ppo_trainer")


def test_values_of_the_models_config_are_ours_and_dropout_is_refused() -> None:
    key = "actor_rollout_ref.model.override_config"
    given: JSON = {
        "attention_dropout": 0.0,
        "attn_implementation": "sdpa",
        "model_config": {"max_position_embeddings": 64},
    }
    assert translate({key: given}, Config).values[key] == {"max_position_embeddings": 64}
    assert translate({key: {"resid_pdrop": 0.0}}, Config).values == {}
    assert key in translate({key: {"resid_pdrop": 0.1}}, Config).unsupported


def test_a_shard_group_as_large_as_the_ranks_is_all_of_them() -> None:
    key = f"{ACTOR}.fsdp_config.fsdp_size"
    for value, ours in ((8, -1), (32, -1), (4, 4), (-1, -1)):
        found = translate({key: value, "trainer.n_gpus_per_node": 8, "trainer.nnodes": 1}, Config)
        assert found.values[key] == ours


def test_a_key_of_ours_is_set_aside_only_where_verl_means_something_else() -> None:
    """A wide pattern that caught a key of ours would keep a command from setting it."""
    caught = {key for key in leaf_keys(Config) if (entry := entry_of(key)) is not None and entry.kind != "translated"}
    assert caught == {
        f"{ROLLOUT}.val_kwargs.do_sample",
        f"{ROLLOUT}.engine_kwargs.vllm",
        f"{ACTOR}.use_torch_compile",
        "reward_model.model.path",
        "reward_model.model.trust_remote_code",
        "reward_model.forward_max_token_len_per_gpu",
        "reward_model.enable_resource_pool",
        "reward_model.nnodes",
        "reward_model.n_gpus_per_node",
        "reward_model.rollout.tensor_model_parallel_size",
        "reward_model.rollout.gpu_memory_utilization",
        "reward_model.rollout.engine_kwargs.sglang",
        "reward_model.rollout.engine_kwargs.vllm",
    }


def test_translations_set_keys_that_there_are() -> None:
    known = leaf_keys(Config)
    assert [name for entry in VERL_KEYS for name in entry.ours if name not in known] == []


def test_the_page_is_that_of_the_table() -> None:
    """`python -m benchmarks.verl.page` writes it."""
    text = PAGE.read_text(encoding="utf-8")
    assert text.count(BEGIN) == 1 and text == page(text)


def test_few_keys_of_public_commands_are_unknown(shared_data: Path) -> None:
    with (shared_data / "data" / "verl_keys" / "refused.csv").open(encoding="utf-8", newline="") as file:
        keys = [row["key"] for row in csv.DictReader(file)]
    known = leaf_keys(Config)
    unknown = [key for key in keys if entry_of(key) is None and key not in known]
    assert len(unknown) < 0.25 * len(keys), unknown


# The values that decide the algorithm: our key, and verl's key or a function of its composed config.
DECIDES: dict[str, str] = {
    **{
        key: key
        for key in (
            "algorithm.adv_estimator",
            "algorithm.gamma",
            "algorithm.lam",
            "algorithm.norm_adv_by_std_in_grpo",
            "algorithm.use_kl_in_reward",
            "algorithm.kl_penalty",
            "algorithm.kl_ctrl.type",
            "algorithm.kl_ctrl.kl_coef",
            f"{ACTOR}.policy_loss.loss_mode",
            f"{ACTOR}.loss_agg_mode",
            f"{ACTOR}.clip_ratio_low",
            f"{ACTOR}.clip_ratio_high",
            f"{ACTOR}.clip_ratio_c",
            f"{ACTOR}.entropy_coeff",
            f"{ACTOR}.use_kl_loss",
            f"{ACTOR}.kl_loss_coef",
            f"{ACTOR}.kl_loss_type",
            f"{ACTOR}.ppo_epochs",
            f"{ACTOR}.ppo_mini_batch_size",
            f"{ACTOR}.shuffle",
            f"{ACTOR}.optim.lr",
            f"{ACTOR}.optim.weight_decay",
            f"{ACTOR}.optim.betas",
            f"{ACTOR}.optim.lr_scheduler_type",
            f"{ACTOR}.optim.lr_warmup_steps_ratio",
            "critic.optim.lr",
            "critic.cliprange_value",
            "critic.ppo_mini_batch_size",
            "critic.ppo_epochs",
            f"{ROLLOUT}.n",
            f"{ROLLOUT}.temperature",
            f"{ROLLOUT}.top_p",
            f"{ROLLOUT}.top_k",
            "data.train_batch_size",
            "data.max_prompt_length",
            "data.max_response_length",
            "trainer.total_epochs",
            "trainer.total_training_steps",
            "trainer.critic_warmup",
        )
    },
    f"{ACTOR}.grad_clip": f"{ACTOR}.optim.clip_grad",
    "critic.grad_clip": "critic.optim.clip_grad",
    "reward_model.reward_manager": "reward.reward_manager.name",
}

COMMANDS = {
    "ppo": [
        "data.train_batch_size=256",
        "data.max_response_length=256",
        f"{ACTOR}.optim.lr=1e-6",
        f"{ACTOR}.ppo_mini_batch_size=64",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        "critic.optim.lr=1e-5",
        "critic.model.path=Qwen/Qwen2.5-0.5B-Instruct",
        "algorithm.kl_ctrl.kl_coef=0.001",
        "trainer.total_epochs=15",
    ],
    "grpo": [
        "algorithm.adv_estimator=grpo",
        "data.truncation=error",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.kl_loss_coef=0.01",
        f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
        f"{ACTOR}.optim.clip_grad=0.5",
        f"{ROLLOUT}.n=5",
        "algorithm.kl_ctrl.kl_coef=0.0",
        f"{ROLLOUT}.val_kwargs.temperature=0.6",
        f"{ROLLOUT}.val_kwargs.n=4",
    ],
    "dapo_losses": [
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.clip_ratio_low=0.2",
        f"{ACTOR}.clip_ratio_high=0.28",
        f"{ACTOR}.clip_ratio_c=10.0",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-sum-norm",
        f"{ACTOR}.kl_loss_coef=0.0",
        "reward_model.reward_manager=dapo",
        "+reward_model.reward_kwargs.overlong_buffer_cfg.enable=False",
        f"{ROLLOUT}.top_p=0.9",
        f"{ROLLOUT}.top_k=20",
        "trainer.total_training_steps=100",
    ],
    "rloo_in_reward": [
        "algorithm.adv_estimator=rloo",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=k2",
        f"{ROLLOUT}.n=4",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.policy_loss.loss_mode=gspo",
        "trainer.resume_from_path=some/checkpoint",
    ],
    "megatron": [
        "model_engine=megatron",
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.megatron.tensor_model_parallel_size=2",
        f"{ACTOR}.megatron.pipeline_model_parallel_size=4",
        f"{ACTOR}.megatron.param_offload=True",
        f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full",
        f"{ACTOR}.optim.lr_decay_style=constant",
    ],
}


def given_by(command: list[str]) -> dict[str, JSON]:
    texts = (text.lstrip("+").partition("=") for text in command)
    values: Iterator[tuple[str, JSON]] = ((key, json.loads(_plain(value))) for key, _, value in texts)
    return dict(values)


def _plain(value: str) -> str:
    if value in ("True", "False"):
        return value.lower()
    try:
        float(value)
    except ValueError:
        return json.dumps(value)
    return value


@pytest.mark.parametrize("name", COMMANDS)
def test_the_values_that_decide_the_algorithm_are_verls(name: str) -> None:
    command = [*COMMANDS[name], f"{ROLLOUT}.name=vllm", "trainer.n_gpus_per_node=8"]
    engine = "megatron" if "model_engine=megatron" in command else "fsdp"
    given = given_by(command)
    reference: Values = {**defaults_of("0.9.1/fsdp"), **defaults_of(f"0.9.1/{engine}"), **given}
    config = load_config(command, "ppo_trainer")
    ours = flatten(config.model_dump(mode="json"), leaf_keys(Config))
    assert len(DECIDES) >= 30
    for key, theirs in DECIDES.items():
        expected = reference[theirs]
        if theirs in ("critic.ppo_mini_batch_size", "critic.ppo_epochs"):
            expected = reference[theirs.replace("critic", ACTOR)]
        if theirs == "reward.reward_manager.name":
            expected = given.get("reward_model.reward_manager", "naive")
        if key.endswith("loss_agg_mode") and reference[f"{ACTOR}.policy_loss.loss_mode"] == "gspo":
            expected = "seq-mean-token-mean"  # written into verl's function
        assert ours[key] == expected, key
    validation = config.actor_rollout_ref.rollout.val_kwargs
    samples = bool(reference[f"{ROLLOUT}.val_kwargs.temperature"])
    assert (validation.do_sample, validation.greedy) == (samples, not samples)
    if samples:
        assert (validation.temperature, validation.n) == (0.6, 4)


def test_a_file_may_name_any_key_of_verls_in_interpolations(tmp_path: Path) -> None:
    """verl composes its own YAML beneath a user's, of which ours has the keys with an effect here."""
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "data:\n  train_max_samples: ${actor_rollout_ref.actor.megatron.seed}\n"
        "  val_max_samples: ${.train_max_samples}\n"
        "actor_rollout_ref:\n"
        "  rollout: {max_num_seqs: '${critic.rollout_n}'}\n"
        "  actor: {optim: {betas: ['${critic.optim.betas.0}', 0.98]}}\n"
        "trainer: {experiment_name: 'a-${actor_rollout_ref.rollout.load_format}'}\n"
    )
    words = [f"--config-path={tmp_path}", "--config-name=mine"]
    config = load_config([*words, f"{ROLLOUT}.n=4"])
    assert (config.data.train_max_samples, config.data.val_max_samples) == (42, 42)
    assert config.actor_rollout_ref.rollout.max_num_seqs == 4, "critic.rollout_n is rollout.n in verl's own YAML"
    assert config.actor_rollout_ref.actor.optim.betas == (0.9, 0.98)
    assert config.trainer.experiment_name == "a-dummy"
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ntrainer: {experiment_name: '${no.such}'}\n")
    with pytest.raises(ConfigError, match=r"no\.such"):
        load_config(words)


FIRST_WEIGHTS = {
    (): None,
    ("rollout_is=False", "rollout_is_threshold=3.0"): None,
    ("rollout_is=True", "rollout_is_threshold=null"): None,
    ("rollout_is=True", "rollout_is_threshold=3.0"): ("token", 3.0, None, "truncate", {"veto": 1e-4}),
    ("rollout_is=True", "rollout_is_threshold=4.0", "rollout_is_mode=mask", "rollout_is_level=sequence"): (
        *("sequence", 4.0, 0.25, "mask", {"veto": 1e-4}),
    ),
    (
        *("rollout_is=True", "rollout_is_threshold=4.0", "rollout_is_threshold_lower=0.5", "rollout_is_mode=mask"),
        *("rollout_is_level=geometric", "rollout_is_veto_threshold=null"),
    ): ("geometric", 4.0, 0.5, "mask", {}),
}


@pytest.mark.parametrize("words", FIRST_WEIGHTS)
def test_importance_weights_of_verl_0_6(words: tuple[str, ...]) -> None:
    """The mode mask leaves out weights outside [1 / threshold, threshold], the veto a sequence with a token below."""
    keys = load_config([f"algorithm.{word}" for word in words], "ppo_trainer").algorithm.rollout_correction
    found = (keys.rollout_is, keys.rollout_is_threshold, keys.rollout_is_lower, keys.rollout_is_outside, keys.reject)
    assert found == (FIRST_WEIGHTS[words] or (None, 2.0, None, "truncate", {}))


def test_a_key_that_examples_misspell_is_told_and_not_refused(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        load_config(["+actor_rollout_ref.model.enable_activation_offloading=True"], "ppo_trainer")
    assert_names(caplog.text, "enable_activation_offloading=true", "no effect")


def test_all_that_waits_is_told_in_one_message() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(
            [
                "algorithm.use_pf_ppo=True",
                "+async_flow.kind=x",
                "+async_resources.pool=2",
                "trainer.device=npu",
                f"{ROLLOUT}.quantization=fp8",
                "nothing.of.verls=1",
            ],
            "ppo_trainer",
        )
    message = str(error.value)
    lines = message.splitlines()
    assert any(
        line.startswith("async_flow.kind=x, async_resources.pool=2 would change the result") for line in lines
    ), message
    for key in ("algorithm.use_pf_ppo", "trainer.device", "quantization"):
        assert any(key in line and "would change the result" in line for line in lines), key
    assert_names(message, "key nothing.of.verls", "unknown")


def test_verls_asynchronous_trainers_are_settings_of_ours() -> None:
    """Staleness counts steps here, and parts of a publication there; engines have devices of their own in both."""
    command = [
        "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        "async_training.require_batches=4",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
        "rollout.total_rollout_steps=204800",
        "rollout.test_freq=5",
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=8",
        "trainer.nnodes=2",
    ]
    for every, threshold, bound in ((4, 0.5, 5), (4, 0.1, 4), (1, 1, 1), (10, 0.1, 10), (3, 0, 2)):
        steps = [f"async_training.trigger_parameter_sync_step={every}"]
        steps += [f"async_training.staleness_threshold={threshold}"]
        config = load_config([*command, *steps], "fully_async_ppo_trainer")
        keys, rollout = config.async_training, config.actor_rollout_ref.rollout
        assert (keys.max_staleness, keys.depth, keys.publish_every) == (bound, bound, every)
        assert (config.data.train_batch_size, config.trainer.total_training_steps) == (128, 1600)
        assert (config.trainer.test_freq, config.trainer.save_freq) == (5 * every, 50 * every)
        assert (rollout.nnodes, rollout.n_gpus_per_node, rollout.free_cache_engine) == (2, 8, False)
        correction = config.algorithm.rollout_correction
        assert (correction.proximal, correction.rollout_is) == ("rollout", None)
    turns = [f"async_training.{name}" for name in ("trigger_parameter_sync_step=1", "staleness_threshold=0")]
    assert load_config([*command, *turns], "fully_async_ppo_trainer").async_training.max_staleness == 0
    mini = "actor_rollout_ref.actor.ppo_mini_batch_size=64"
    ahead = load_config(["data.train_batch_size=64", mini, "trainer.save_freq=7"], "one_step_off_ppo_trainer")
    keys, rollout = ahead.async_training, ahead.actor_rollout_ref.rollout
    assert (keys.max_staleness, keys.depth, keys.publish_every, rollout.nnodes) == (1, 1, 1, 1)
    assert (ahead.data.train_batch_size, ahead.trainer.save_freq) == (64, 7)
    assert load_config([], "one_step_off_ppo_trainer").trainer.save_freq == 50
    assert ahead.algorithm.rollout_correction.rollout_is is None, "verl's defaults hold"
    with pytest.raises(ConfigError, match="staleness_threshold, found -1"):
        load_config(["async_training.staleness_threshold=-1"], "fully_async_ppo_trainer")
    whole = ["async_training.partial_rollout=false"]
    with naming(ConfigError, "async_training.partial_rollout=false"):
        load_config(whole, "fully_async_ppo_trainer")
    load_config([*whole, "async_training.staleness_threshold=0"], "fully_async_ppo_trainer")


V1_MODES = "trainer.v1.trainer_mode"
STEP = ["data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16", "data.gen_batch_size=1"]


@pytest.mark.parametrize(
    ("mode", "further", "ahead", "saves"),
    [
        ("colocate_async", [], (7, 1), 50),
        ("separate_async", ["actor_rollout_ref.rollout.nnodes=1", "trainer.save_freq=5"], (7, 1), 5),
        (
            "separate_async",
            ["trainer.v1.separate_async.num_warmup_batches=3", "trainer.v1.sampler.max_off_policy_threshold=3"],
            (2, 2),
            50,
        ),
        ("colocate_async", ["trainer.v1.sampler.max_off_policy_threshold=1"], (0, 1), -1),
        ("colocate_async", ["trainer.v1.colocate_async.num_warmup_batches=0"], (0, 1), -1),
        ("colocate_async", ["trainer.use_v1=false", "data.gen_batch_size=null"], (0, 1), -1),
    ],
)
def test_modes_of_verls_newer_trainer_bound_staleness(
    mode: str, further: list[str], ahead: tuple[int, int], saves: int
) -> None:
    config = load_config([*STEP, f"{V1_MODES}={mode}", *further], "ppo_trainer")
    keys = config.async_training
    assert (keys.max_staleness, keys.depth, keys.publish_every) == (*ahead, 1)
    assert (config.trainer.save_freq, config.data.train_batch_size) == (saves, 64)
    apart = mode == "separate_async" and ahead[0] > 0
    assert config.actor_rollout_ref.rollout.free_cache_engine is not apart, "devices that are shared are freed"
    assert config.algorithm.rollout_correction.rollout_is is None, "verl's defaults hold"


def test_an_engine_on_the_policys_devices_may_keep_its_memory() -> None:
    keeps = [f"{V1_MODES}=colocate_async", "actor_rollout_ref.rollout.free_cache_engine=false"]
    config = load_config([*STEP, *keeps], "ppo_trainer")
    assert not config.actor_rollout_ref.rollout.free_cache_engine


ASYNC = ("fully_async_ppo_trainer", "fully_async_ppo_megatron_trainer")
AHEAD = ("one_step_off_ppo_trainer", "one_step_off_ppo_megatron_trainer")
DECOUPLED = "algorithm.rollout_correction.bypass_mode=false"


@pytest.mark.parametrize(
    ("trainers", "command", "proximal", "weight"),
    [
        (ASYNC, [], "rollout", None),
        (AHEAD, [], "rollout", None),
        (ASYNC, ["algorithm.rollout_correction.rollout_is=sequence"], "rollout", None),
        (ASYNC, [DECOUPLED, "algorithm.rollout_correction.rollout_is=token"], "published", "token"),
        (ASYNC, [DECOUPLED, "async_training.trigger_parameter_sync_step=1"], "recomputed", None),
        (AHEAD, [DECOUPLED, "algorithm.rollout_correction.rollout_is=token"], "recomputed", "token"),
        (
            ASYNC,
            ["async_training.compute_prox_log_prob=True", "async_training.use_rollout_log_probs=True"],
            "published",
            None,
        ),
        (ASYNC, ["async_training.use_rollout_log_probs=False"], "recomputed", None),
        (("ppo_trainer",), [f"{ACTOR}.use_rollout_log_probs=True"], "recomputed", None),
    ],
)
def test_the_proximal_policy_of_verls_asynchronous_trainers(
    trainers: tuple[str, ...], command: list[str], proximal: str, weight: str | None
) -> None:
    for trainer in trainers:
        keys = load_config(command, trainer).algorithm.rollout_correction
        assert (keys.proximal, keys.rollout_is) == (proximal, weight), trainer


def test_verls_asynchronous_trainer_counts_publications() -> None:
    every = ["async_training.trigger_parameter_sync_step=4", "trainer.save_freq=3"]
    config = load_config([*every, "trainer.test_freq=5"], ASYNC[0])
    assert (config.trainer.test_freq, config.trainer.save_freq) == (20, 12)
    config = load_config([*every, "trainer.test_freq=5", "rollout.test_freq=-1"], ASYNC[0])
    assert config.trainer.test_freq == -1, "the name of earlier releases"
    config = load_config([*every, "trainer.test_freq=5", "async_training.use_rollout_log_probs=true"], ASYNC[0])
    assert config.trainer.test_freq == 4, "earlier releases do not read trainer.test_freq here"
    config = load_config(["trainer.test_freq=5", "trainer.save_freq=3"], "ppo_trainer")
    assert (config.trainer.test_freq, config.trainer.save_freq) == (5, 3)
    mini = ["actor_rollout_ref.actor.ppo_mini_batch_size=32", "rollout.total_rollout_steps=100"]
    assert load_config(mini, ASYNC[0]).trainer.total_training_steps == 3, "verl leaves the last 4 prompts"


def test_the_trainers_devices_do_not_generate(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        load_config(["async_training.use_dynamic_resource_scheduling=true"], ASYNC[0])
    assert_names(caplog.text, "use_dynamic_resource_scheduling:")


def test_without_dynamic_sampling_dapos_recipe_trains_on_the_generation_batch() -> None:
    sizes = ["data.train_batch_size=16", "data.gen_batch_size=48", f"{ACTOR}.ppo_mini_batch_size=16"]
    assert load_config(sizes, "dapo_trainer").data.train_batch_size == 48
    with naming(ConfigError, "data.gen_batch_size=48"):
        load_config(sizes, "ppo_trainer")


def test_further_tokens_are_refused_where_all_layers_would_learn_by_them(caplog: pytest.LogCaptureFixture) -> None:
    keys = [
        f"+actor_rollout_ref.model.mtp.{key}" for key in ("enable=true", "enable_train=true", "enable_rollout=true")
    ]
    with naming(ConfigError, "mtp.enable_train=true"):
        load_config(keys, "ppo_trainer")
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        load_config([*keys, "+actor_rollout_ref.model.mtp.detach_encoder=true"], "ppo_trainer")
    assert_names(caplog.text, "mtp.enable_train")


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("transfer_queue_ppo_trainer", "ppo_trainer"),
        ("transfer_queue_ppo_megatron_trainer", "ppo_megatron_trainer"),
        ("dapo_transfer_queue_trainer", "dapo_megatron_trainer"),
    ],
)
def test_trainers_with_a_queue_of_batches_are_those_without(name: str, like: str) -> None:
    names = ["trainer.project_name=a"]
    assert load_config(names, name) == load_config(names, like)


DAPO = [
    "data.train_batch_size=512",
    "data.gen_batch_size=1536",
    "data.max_response_length=20480",
    f"{ROLLOUT}.n=16",
    "algorithm.adv_estimator=grpo",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=10",
    "reward_model.reward_manager=dapo",
]
OVERLONG_BUFFERS = {
    "reward_model.overlong_buffer": (),
    "reward_model.reward_kwargs.overlong_buffer_cfg": ("+reward_model.reward_kwargs.max_resp_len=20480",),
    "reward.reward_kwargs.overlong_buffer_cfg": ("+reward.reward_kwargs.max_resp_len=20480",),
}


@pytest.mark.parametrize("section", OVERLONG_BUFFERS)
def test_dapos_keys_are_taken_in_every_spelling(section: str) -> None:
    values = {"enable": "True", "len": "4096", "penalty_factor": "0.5", "log": "False"}
    buffer = [f"+{section}.{name}={value}" for name, value in values.items()]
    config = load_config([*DAPO, *buffer, *OVERLONG_BUFFERS[section]], "ppo_trainer")
    keys, found = config.algorithm.filter_groups, config.reward_model.overlong_buffer
    assert (keys.refill, keys.metric, keys.max_num_gen_batches) == (True, "acc", 10)
    assert (config.data.gen_batch_size, config.reward_model.reward_manager) == (1536, "dapo")
    assert (found.enable, found.len, found.penalty_factor) == (True, 4096, 0.5)
    assert found.max_resp_len == (20480 if OVERLONG_BUFFERS[section] else None)
    # Only the manager dapo reads it.
    other = [f"{key}=naive" if key.endswith("reward_manager") else f"{key}={value}" for key, value in _pairs(DAPO)]
    config = load_config([*other, *buffer, *OVERLONG_BUFFERS[section]], "ppo_trainer")
    assert not config.reward_model.overlong_buffer.enable


def _pairs(command: list[str]) -> list[list[str]]:
    return [text.split("=", 1) for text in command]


@pytest.mark.parametrize(
    ("more", "metric", "bound"),
    [
        (["algorithm.filter_groups.metric=seq_final_reward"], "reward", 10),
        (["algorithm.filter_groups.metric=seq_reward", "algorithm.use_kl_in_reward=True"], "reward", 10),
        (["algorithm.filter_groups.max_num_gen_batches=-1"], "acc", 0),
    ],
)
def test_verls_names_of_rewards_and_of_no_bound_are_ours(more: list[str], metric: str, bound: int) -> None:
    keys = load_config([*DAPO, *more], "dapo_trainer").algorithm.filter_groups
    assert (keys.metric, keys.max_num_gen_batches) == (metric, bound)


VERLS_DAPO_32B = [
    *DAPO,
    "data.max_prompt_length=2048",
    "algorithm.use_kl_in_reward=False",
    "algorithm.kl_ctrl.kl_coef=0.0",
    f"{ACTOR}.use_kl_loss=False",
    f"{ACTOR}.kl_loss_coef=0.0",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.clip_ratio_c=10.0",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_max_token_len_per_gpu=22528",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    f"{ACTOR}.optim.lr=1e-6",
    f"{ACTOR}.optim.lr_warmup_steps=10",
    f"{ACTOR}.optim.weight_decay=0.1",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.fsdp_config.param_offload=True",
    f"{ACTOR}.fsdp_config.optimizer_offload=True",
    f"{ACTOR}.entropy_coeff=0",
    f"{ACTOR}.grad_clip=1.0",
    f"{ACTOR}.loss_agg_mode=token-mean",
    f"{ACTOR}.ulysses_sequence_parallel_size=8",
    f"{ROLLOUT}.gpu_memory_utilization=0.80",
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.temperature=1.0",
    f"{ROLLOUT}.top_p=1.0",
    f"{ROLLOUT}.top_k=-1",
    f"{ROLLOUT}.val_kwargs.temperature=1.0",
    f"{ROLLOUT}.val_kwargs.top_p=0.7",
    f"{ROLLOUT}.val_kwargs.do_sample=True",
    f"{ROLLOUT}.name=vllm",
    "reward_model.overlong_buffer.enable=True",
    "reward_model.overlong_buffer.len=4096",
    "reward_model.overlong_buffer.penalty_factor=1.0",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=16",
    "trainer.test_freq=5",
    "trainer.save_freq=5",
    "trainer.total_epochs=1",
]
"""What run_dapo_qwen2.5_32b.sh of verl's recipe sets, but for paths and names."""


VERLS_RETOOL_32B = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=512",
    "data.max_prompt_length=2048",
    "data.max_response_length=16384",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.clip_ratio_c=10.0",
    f"{ACTOR}.optim.lr=1e-6",
    f"{ACTOR}.use_dynamic_bsz=True",
    f"{ACTOR}.ppo_mini_batch_size=64",
    f"{ACTOR}.ppo_max_token_len_per_gpu=18432",
    f"{ACTOR}.ulysses_sequence_parallel_size=8",
    f"{ACTOR}.fsdp_config.param_offload=True",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.multi_turn.enable=True",
    f"{ROLLOUT}.multi_turn.max_assistant_turns=8",
    f"{ROLLOUT}.multi_turn.tool_config_path=tools/code_interpreter.yaml",
    f"{ROLLOUT}.multi_turn.format=hermes",
    f"{ROLLOUT}.gpu_memory_utilization=0.9",
    f"{ROLLOUT}.n=16",
    f"{ROLLOUT}.val_kwargs.temperature=1.0",
    f"{ROLLOUT}.val_kwargs.top_p=0.6",
    f"{ROLLOUT}.val_kwargs.n=30",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=4",
    "trainer.total_epochs=1",
    "trainer.total_training_steps=150",
]
"""What decides in run_qwen2.5_32b_dapo.sh of verl's recipe of ReTool, for 150 steps and 30 answers in validation."""


@pytest.mark.parametrize(
    ("name", "command", "trainer", "further"),
    [
        (
            "dapo_qwen2.5_32b",
            VERLS_DAPO_32B,
            "dapo_trainer",
            ["data.gen_batch_size", "trainer.n_gpus_per_node", f"{ROLLOUT}.free_cache_engine"],
        ),
        (
            "retool_qwen2.5_32b",
            VERLS_RETOOL_32B,
            "ppo_trainer",
            [f"{ROLLOUT}.multi_turn.{key}" for key in ("max_assistant_turns", "max_parallel_calls", "format")]
            + [f"{ROLLOUT}.multi_turn.force_final_answer", f"{ACTOR}.ppo_max_token_len_per_gpu"],
        ),
    ],
)
def test_our_recipes_have_the_values_of_verls(name: str, command: list[str], trainer: str, further: list[str]) -> None:
    ours, verls = (
        flatten(load_config(argv, start).model_dump(mode="json"), leaf_keys(Config))
        for argv, start in (([], f"recipe/{name}"), (command, trainer))
    )
    without_effect = ("critic.", "algorithm.kl_", "algorithm.lam", f"{ACTOR}.kl_loss_")
    decide = [key for key in DECIDES if not key.startswith(without_effect)]
    decide += [key for key in ours if key.startswith(("algorithm.filter_groups.", "reward_model.overlong_buffer."))]
    decide += ["trainer.nnodes", f"{ROLLOUT}.val_kwargs.top_p", f"{ROLLOUT}.num_servers"]
    decide += ["actor_rollout_ref.model.dtype", *further]
    assert {key: ours[key] for key in decide} == {key: verls[key] for key in decide}


def test_gdpos_rewards_are_options_of_the_estimator() -> None:
    keys = ["+algorithm.gdpo_reward_keys=[format,accuracy]", "+algorithm.gdpo_reward_weights=[0.5,1.0]"]
    config = load_config(["algorithm.adv_estimator=gdpo", f"{ROLLOUT}.n=4", *keys], "ppo_trainer").algorithm
    assert config.adv_options == {"reward_keys": ["format", "accuracy"], "reward_weights": [0.5, 1.0]}
    assert load_config(["algorithm.adv_estimator=grpo", *keys], "ppo_trainer").algorithm.adv_options == {}


def test_options_of_a_loss_follow_the_loss() -> None:
    command = [f"{ACTOR}.policy_loss.loss_mode=sapo", f"{ACTOR}.tau_pos=0.9"]
    options = load_config(command, "ppo_trainer").actor_rollout_ref.actor.policy_loss.options
    assert options == {"tau_pos": 0.9}, "the other one has verl's default"
    assert load_config(command[1:], "ppo_trainer").actor_rollout_ref.actor.policy_loss.options == {}
    command = [f"{ACTOR}.policy_loss.loss_mode=clip-cov", f"{ACTOR}.policy_loss.clip_cov_ub=4.0"]
    chosen = load_config(command, "ppo_trainer").actor_rollout_ref.actor.policy_loss
    assert (chosen.loss_mode, chosen.options["clip_cov_ub"]) == ("clip_cov", 4.0)
    command = [f"{ACTOR}.policy_loss.loss_mode=dro", f"{ACTOR}.policy_loss.dro_beta=0.3"]
    assert load_config(command, "ppo_trainer").actor_rollout_ref.actor.policy_loss.options == {"dro_beta": 0.3}


# verl 0.9.1's presets, by the keys that they set, and presets of earlier releases behind them.
CORRECTION = "algorithm.rollout_correction"
Keys = dict[str, object]
SEQUENCE: Keys = {"rollout_is": "sequence"}
TOKEN: Keys = {"rollout_is": "token"}
GEO: Keys = {"reject": {"geometric": (1 / 1.001, 1 / 0.999)}}
ROLLOUT_PROXIMAL: Keys = {"proximal": "rollout"}
GEO_KEYS = ["rollout_rs=seq_mean_k1", 'rollout_rs_threshold="0.999_1.001"']
BYPASS = ["bypass_mode=true", "loss_type=ppo_clip"]
REINFORCE = ["bypass_mode=true", "loss_type=reinforce"]
PRESETS: list[tuple[str, list[str], Keys]] = [
    ("decoupled_token_is", ["rollout_is=token"], TOKEN),
    ("decoupled_seq_is", ["rollout_is=sequence", "rollout_is_threshold=3.0"], SEQUENCE | {"rollout_is_threshold": 3.0}),
    (
        "decoupled_token_icepop",
        ["rollout_is=token", 'rollout_is_threshold="0.5_5.0"'],
        TOKEN | {"rollout_is_threshold": 5.0, "rollout_is_lower": 0.5, "rollout_is_outside": "mask"},
    ),
    (
        "decoupled_seq_is_rs",
        ["rollout_is=sequence", "rollout_rs=seq_sum_k1", 'rollout_rs_threshold="0.5_3.0"'],
        SEQUENCE | {"reject": {"sequence": (1 / 3, 2.0)}},
    ),
    ("decoupled_geo_rs", GEO_KEYS, GEO),
    ("decoupled_geo_rs_seq_tis", ["rollout_is=sequence", *GEO_KEYS], SEQUENCE | GEO),
    ("decoupled_geo_rs_token_tis", ["rollout_is=token", *GEO_KEYS], TOKEN | GEO),
    ("decoupled_k3_rs", ["rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"], {"reject": {"seq_mean_k3": 0.01}}),
    (
        "decoupled_k3_rs_token_tis",
        ["rollout_is=token", "rollout_rs=seq_mean_k3", "rollout_rs_threshold=0.01"],
        TOKEN | {"reject": {"seq_mean_k3": 0.01}},
    ),
    (
        "several",
        ['rollout_rs="token_k1,seq_max_k3"', 'rollout_rs_threshold="2.0,0.1"'],
        {"reject": {"token": (0.5, 2.0), "seq_max_k3": 0.1}},
    ),
    ("bypass_ppo_clip", BYPASS, ROLLOUT_PROXIMAL),
    ("bypass_ppo_clip_geo_rs", [*BYPASS, *GEO_KEYS], ROLLOUT_PROXIMAL | GEO),
    ("weights that PPO's ratio stands for", [*BYPASS, "rollout_is=token"], ROLLOUT_PROXIMAL),
    ("bypass_pg_is", [*REINFORCE, "rollout_is=sequence"], ROLLOUT_PROXIMAL | SEQUENCE),
    ("bypass_pg_geo_rs", [*REINFORCE, *GEO_KEYS], ROLLOUT_PROXIMAL | GEO),
    (
        "an earlier release's veto",
        [
            "rollout_is=token",
            "+rollout_token_veto_threshold=1e-4",
            "rollout_rs=geometric",
            "rollout_rs_threshold=1.001",
        ],
        TOKEN | {"reject": {"geometric": (1 / 1.001, 1.001), "veto": 1e-4}},
    ),
    ("off", ["rollout_is=null", "bypass_mode=false", "rollout_is_threshold=5.0"], {}),
]


@pytest.mark.parametrize(("command", "expected"), [case[1:] for case in PRESETS], ids=[case[0] for case in PRESETS])
def test_presets_of_corrections(command: list[str], expected: Keys) -> None:
    given = [("+" if key.startswith("+") else "") + f"{CORRECTION}.{key.lstrip('+')}" for key in command]
    config = load_config(given, "ppo_trainer")
    found = config.algorithm.rollout_correction.model_dump(exclude_defaults=True)
    assert found.pop("reject", {}) == {
        name: pytest.approx(bounds)
        for name, bounds in expected.get("reject", {}).items()  # type: ignore[attr-defined]
    }
    assert found == {name: value for name, value in expected.items() if name != "reject"}
    loss = config.actor_rollout_ref.actor.policy_loss.loss_mode
    assert loss == ("gpg" if "loss_type=reinforce" in command else "vanilla")


def test_the_first_name_of_truncated_weights() -> None:
    config = load_config([f"+{ACTOR}.tis_imp_ratio_cap=3"], "ppo_trainer").algorithm.rollout_correction
    assert (config.rollout_is, config.rollout_is_threshold) == ("token", 3)


REFUSED: list[tuple[list[str], str]] = [
    ([*STEP, f"{V1_MODES}=separate_async", "trainer.v1.separate_async.parameter_sync_step=2"], "should be 32, not 64"),
    ([*STEP, f"{V1_MODES}=together"], "expected sync, colocate_async or separate_async, found 'together'"),
    (
        [*STEP, f"{V1_MODES}=colocate_async", "trainer.v1.sampler.max_off_policy_threshold=0"],
        "threshold >= 1: 1 and 0",
    ),
    (["trainer.v1.sampler.custom_sampler.path=own.py"], "custom_sampler.path=own.py would change the result"),
    (
        [*DAPO, "algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=True"],
        "metric=seq_reward compares without it",
    ),
    ([f"{CORRECTION}.rollout_rs=token_k1"], "must have one threshold, or one for each of token_k1; found None"),
    (
        [f"{CORRECTION}.rollout_rs=seq_mean_k1", f"{CORRECTION}.rollout_rs_threshold=much"],
        "expected a number above 0, or lower_upper",
    ),
    (
        [f"{CORRECTION}.rollout_rs=seq_mean_k3", f'{CORRECTION}.rollout_rs_threshold="0.5_2.0"'],
        "seq_mean_k3 has one bound",
    ),
    (
        [f"{CORRECTION}.rollout_rs=seq_max_k1", f"{CORRECTION}.rollout_rs_threshold=2.0"],
        "there is no criterion seq_max_k1",
    ),
    (
        [f"{CORRECTION}.rollout_is=token", f'{CORRECTION}.rollout_is_threshold="2.0_0.5"'],
        "bounds must be above 0, the lower one first",
    ),
    (
        [f"{CORRECTION}.{key}" for key in ("rollout_is=token", "rollout_is_batch_normalize=true", *REINFORCE)],
        "the mean of each micro-batch",
    ),
    ([f"{CORRECTION}.bypass_mode=true", f"{ACTOR}.policy_loss.loss_mode=gspo"], "leave loss_mode out"),
    (["data.truncation=sideways"], "data.truncation"),
]


@pytest.mark.parametrize(("command", "said"), REFUSED)
def test_what_has_no_equal_or_no_meaning_is_refused(command: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        load_config(command, "ppo_trainer")


def test_notes_are_one_summary_and_other_defaults_are_named(caplog: pytest.LogCaptureFixture) -> None:
    command = [f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", "trainer.balance_batch=False", "data.train_batch_size=512"]
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        load_config(command, "ppo_trainer")
    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if text.startswith("2 keys of verl's have no effect")]) == 1
    (others,) = [text for text in told if "verl's defaults hold" in text]
    assert "algorithm.adv_estimator=gae (grpo)" in others
    assert "trainer.total_epochs=30 (1)" in others
    assert "data.train_batch_size" not in others, "the command says it"
    caplog.clear()
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        load_config([*command, "trainer.show_verl_notes=true"], "ppo_trainer")
    (listed,) = [text for record in caplog.records if "without effect here" in (text := record.getMessage())]
    assert_names(listed, "trainer.balance_batch", "micro-batches")


def test_a_backend_of_another_kind_is_told_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        config = load_config(
            [
                "model_engine=megatron",
                f"{ACTOR}.megatron.tensor_model_parallel_size=2",
                f"{ACTOR}.megatron.context_parallel_size=2",
                f"{ACTOR}.megatron.pipeline_model_parallel_size=4",
            ],
            "ppo_trainer",
        )
    actor = config.actor_rollout_ref.actor
    assert (actor.strategy, actor.fsdp_config.tensor_parallel_size, actor.ulysses_sequence_parallel_size) == (
        "fsdp2",
        2,
        2,
    )
    told = "\n".join(record.getMessage() for record in caplog.records)
    assert_names(told, f"{ACTOR}.megatron.pipeline_model_parallel_size", "FSDP2")
    assert "sharded by FSDP2, too" in told


def test_a_run_in_verls_dialect_is_written_in_our_words(tmp_path: Path) -> None:
    from agentrl.config import write_config

    config = load_config(["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"], "ppo_trainer")
    write_config(config, tmp_path / "config.yaml")
    assert load_config([f"--config-path={tmp_path}", "--config-name=config"]) == config


def test_agentrl_train_guesses_nothing() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["critic.model.path=x", "algorithm.adv_estimator=gae"])
    assert "agentrl.verl.main_ppo" in str(error.value)
    assert load_config(["trainer.balance_batch=True"]).algorithm.adv_estimator == "grpo"


def test_search_r1s_lengths_are_those_of_its_loop() -> None:
    config = load_config(
        [
            "data.max_prompt_length=4096",
            "data.max_start_length=2048",
            "data.max_response_length=500",
            "data.max_obs_length=500",
            "max_turns=2",
            f"{ACTOR}.state_masking=true",
            f"{ROLLOUT}.n_agent=5",
            f"{ACTOR}.clip_ratio=0.1",
        ],
        "search_r1_trainer",
    )
    turns = config.actor_rollout_ref.rollout.multi_turn
    assert (config.data.max_prompt_length, config.data.max_response_length) == (2048, 2 * 1000 + 500)
    assert (turns.max_tokens_per_turn, turns.max_assistant_turns, turns.force_final_answer) == (500, 2, True)
    assert config.actor_rollout_ref.rollout.agent.default_agent_loop == "search_r1"
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.clip_low) == (5, 0.1)


def test_a_template_may_stand_in_the_command() -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    config = load_config([f"actor_rollout_ref.model.custom_chat_template='{template}'"], "ppo_trainer")
    assert config.actor_rollout_ref.model.chat_template == template


def test_long_prompts_are_cut_where_the_command_says() -> None:
    assert load_config(["data.truncation=middle"], "ppo_trainer").data.truncation == "middle"
    both = load_config(["data.truncation=left", "data.filter_overlong_prompts=True"], "ppo_trainer")
    assert both.data.filter_overlong_prompts, "nothing is left that could be cut, as verl has it"


def test_search_r1s_retriever_is_the_commands_unless_a_tool_file_says_more(tmp_path: Path) -> None:
    url = "http://127.0.0.1:8765/retrieve"
    words = [f"{ACTOR}.state_masking=true", "max_turns=2", f"retriever.url={url}", "retriever.topk=5"]
    words.append("data.max_obs_length=7")
    turns = load_config(words, "search_r1_trainer").actor_rollout_ref.rollout.multi_turn
    assert turns.tool_options == {"search": {"url": url, "topk": 5, "max_response_tokens": 7}}
    (tmp_path / "tools.yaml").write_text("tools: []")
    own = [*words, f"{ROLLOUT}.multi_turn.tool_config_path={tmp_path}/tools.yaml"]
    assert load_config(own, "search_r1_trainer").actor_rollout_ref.rollout.multi_turn.tool_options == {}


@pytest.mark.parametrize(
    "words",
    [
        ["reward_model.enable=True", "reward_model.model.path=/rm", "reward_model.max_length=77"],
        ["reward.reward_model.enable=True", "reward.reward_model.model_path=/rm"],
    ],
)
def test_a_reward_model_that_scores_by_itself_is_ours(words: list[str], tmp_path: Path) -> None:
    """verl's reward is the model's score alone then."""
    keys = load_config(words, "ppo_trainer").reward_model
    assert (keys.enable, keys.model.path, keys.model.replaces_scorers) == (True, "/rm", True)
    assert keys.max_length == (77 if "reward_model.max_length=77" in words else None)


SERVED = [
    "enable=True",
    "enable_resource_pool=True",
    "n_gpus_per_node=8",
    "nnodes=2",
    "rollout.name=vllm",
    "rollout.gpu_memory_utilization=0.95",
    "rollout.tensor_model_parallel_size=1",
]


@pytest.mark.parametrize(
    ("section", "more"),
    [
        ("reward_model", ["reward_model.model.path=/rm", "reward_model.rollout.free_cache_engine=False"]),
        ("reward.reward_model", ["reward.reward_model.model_path=/rm"]),
    ],
)
def test_a_reward_model_that_a_function_asks_is_served(section: str, more: list[str], tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text("def compute_score(solution_str, reward_router_address): return 0\n")
    words = [*(f"{section}.{word}" for word in SERVED), *more, f"custom_reward_function.path={tmp_path}/f.py"]
    words.append(f"+{section}.rollout.engine_kwargs.sglang.attention_backend=fa3")
    keys = load_config(words, "ppo_trainer").reward_model
    assert keys.generates and not keys.classifies and keys.model.path == "/rm"
    assert (keys.enable_resource_pool, keys.nnodes, keys.n_gpus_per_node) == (True, 2, 8)
    assert (keys.rollout.tensor_model_parallel_size, keys.rollout.gpu_memory_utilization) == (1, 0.95)
    assert keys.rollout.engine_kwargs.sglang == {"attention_backend": "fa3"}
    assert (keys.timeout, keys.max_concurrent) == (1800, 256), "verl waits as long as it takes"
    without = [word for word in words if "tensor_model_parallel" not in word and "pool" not in word]
    keys = load_config([*without, "reward_model.timeout=60"], "ppo_trainer").reward_model
    assert (keys.rollout.tensor_model_parallel_size, keys.timeout) == (2, 60), "verl's default"
    keys = load_config([*without, "reward_model.rollout.server_urls=http://rm:30000"], "ppo_trainer").reward_model
    assert keys.rollout.server_urls == ["http://rm:30000"]
    with naming(ConfigError, "quantised"):
        load_config([*words, "reward.reward_model.rollout.quantization=fp8"], "ppo_trainer")


@pytest.mark.parametrize("section", ["reward_model", "reward.reward_model"])
def test_servers_of_a_reward_model_run_the_software_that_verl_names(
    section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM where it is installed, else SGLang with a note, also of the policy's engine."""
    (tmp_path / "f.py").write_text("def compute_score(solution_str, reward_router_address): return 0\n")
    name = "model.path" if section == "reward_model" else "model_path"
    words = [f"{section}.enable=True", f"{section}.{name}=/rm", f"{section}.rollout.name=vllm"]
    words += ["actor_rollout_ref.rollout.name=vllm", f"+{section}.rollout.engine_kwargs.sglang.attention_backend=fa3"]
    asked = [*words, f"custom_reward_function.path={tmp_path}/f.py"]

    def read(words: list[str], installed: set[str]) -> tuple[Config, str]:
        for module in ("agentrl.config.installed", "agentrl.verl.keys.rewrites"):
            monkeypatch.setattr(f"{module}.is_installed", installed.__contains__)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "agentrl.config"):
            config = load_config(words, "ppo_trainer")
        return config, "\n".join(record.getMessage() for record in caplog.records)

    note = "SGLang's servers stand for trtllm, hf and dynamo, and for vllm where it is not installed"
    config, notes = read(asked, {"vllm"})
    assert config.reward_model.rollout.name == config.actor_rollout_ref.rollout.name == "vllm"
    assert config.reward_model.rollout.engine_kwargs.sglang == {} and note not in notes
    config, notes = read(asked, {"sglang"})
    assert config.reward_model.rollout.name == config.actor_rollout_ref.rollout.name == "sglang"
    assert config.reward_model.rollout.engine_kwargs.sglang == {"attention_backend": "fa3"}
    assert f"actor_rollout_ref.rollout.name, {section}.rollout.name: {note}: sglang here" in notes
    config, notes = read([*asked, f"{section}.rollout.name=sglang"], {"vllm", "sglang"})
    assert config.reward_model.rollout.name == "sglang" and note not in notes
    _, notes = read(words, {"sglang"})
    assert f"actor_rollout_ref.rollout.name: {note}: sglang here" in notes, "no server is started for the other one"
    config, notes = read([*asked, "+actor_rollout_ref.rollout.server_urls=[http://gpu:8000]"], {"sglang"})
    assert (config.actor_rollout_ref.rollout.name, config.reward_model.rollout.name) == ("vllm", "sglang")
    assert f"{section}.rollout.name: {note}: sglang here" in notes and "actor_rollout_ref.rollout.name" not in notes


def test_samplers_are_named_in_verls_words(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from agentrl.verl import AbstractSampler\n\n\nclass Mine(AbstractSampler):\n"
        "    def __init__(self, data_source, data_config): ...\n    def __iter__(self): ...\n"
    )
    path = f"data.sampler.class_path={tmp_path}/mine.py"
    config = load_config([path, "data.sampler.class_name=Mine", "data.dataloader_num_workers=0"], "ppo_trainer")
    assert config.data.sampler.name == f"{tmp_path}/mine.py:Mine"
    with naming(ConfigError, "data.sampler.class_name"):
        load_config([path], "ppo_trainer")


def test_a_key_of_verls_that_nothing_reads_is_not_proposed_for_itself() -> None:
    with pytest.raises(ConfigError, match=r"unknown key trainer\.ref_update_freq(?!.*trainer\.ref_update_freq)"):
        load_config(["trainer.ref_update_freq=3"], "ppo_trainer")


def test_a_negative_number_of_generations_to_log_is_all_of_them() -> None:
    assert load_config(["trainer.log_val_generations=-1"], "ppo_trainer").trainer.log_val_generations == 1_000_000
    assert load_config(["trainer.log_val_generations=3"], "ppo_trainer").trainer.log_val_generations == 3


def test_keys_are_deleted_as_in_our_own_configs() -> None:
    assert load_config(["~trainer.total_epochs"], "ppo_trainer").trainer.total_epochs == 1


DISTIL, LOSS, TEACHERS = "distillation.", "distillation.distillation_loss.", "distillation.teacher_models."


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        (
            {f"{TEACHERS}teacher_model.model_path": "t"},
            {"teacher.path": "t", "estimator": "k3", "use": "loss", "coef": 1.0},
        ),
        (
            {
                f"{TEACHERS}teacher_model.model_path": "t",
                f"{LOSS}loss_mode": "kl",
                f"{LOSS}use_policy_gradient": True,
                f"{LOSS}use_task_rewards": False,
                f"{LOSS}distillation_loss_coef": 0.5,
                f"{LOSS}loss_max_clamp": 10.0,
                f"{LOSS}log_prob_min_clamp": -10.0,
            },
            {
                "teacher.path": "t",
                "estimator": "k1",
                "use": "advantage",
                "policy_loss_coef": 0.0,
                "max_divergence": 10.0,
            },
        ),
        (
            {
                f"{TEACHERS}teacher_model.model_path": "left out",
                f"{TEACHERS}a.model_path": "t1",
                f"{TEACHERS}a.key": "math",
                f"{TEACHERS}b.model_path": "t2",
                f"{TEACHERS}b.key": "code",
                f"{LOSS}loss_mode": "forward_kl_topk",
                f"{LOSS}log_prob_min_clamp": -10.0,
                f"{LOSS}distillation_loss_coef": 0.5,
            },
            {
                "divergence_options": {"min_logprob": -10.0},
                "by_source": {"math": {"path": "t1"}, "code": {"path": "t2"}},
                "scope": "top_k",
                "divergence": "forward_kl",
                "top_k": 32,
                "coef": 0.5,
            },
        ),
    ],
)
def test_a_distillation_of_verls_is_one_of_ours(given: dict[str, JSON], ours: dict[str, JSON]) -> None:
    defaults = defaults_of(TRAINERS[0])
    assert not any(key.startswith(DISTIL) for key in translate(defaults | given, Config).values), "it is not enabled"
    found = translate(defaults | {"distillation.enabled": True} | given, Config)
    assert found.unsupported == {} and found.strangers == []
    assert {key.removeprefix(DISTIL): one for key, one in found.values.items() if key.startswith(DISTIL)} == ours


@pytest.mark.parametrize(
    "given",
    [
        {f"{LOSS}loss_mode": "entropy"},
        {"distillation.teacher_key": "task"},
        {f"{LOSS}loss_mode": "forward_kl_topk", f"{LOSS}use_policy_gradient": True},
    ],
)
def test_what_distillation_has_not_is_refused(given: dict[str, JSON]) -> None:
    enabled: dict[str, JSON] = {"distillation.enabled": True, f"{TEACHERS}teacher_model.model_path": "t"}
    assert len(translate(defaults_of(TRAINERS[0]) | enabled | given, Config).unsupported) == 1


REPLAY = f"{ACTOR}.router_replay.mode"


@pytest.mark.parametrize("backend", ["", "megatron."])
def test_experts_are_replayed_where_the_engine_tells_them(backend: str) -> None:
    command = [f"+{ACTOR}.{backend}router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"]
    config = load_config([*command, f"{ROLLOUT}.name=embedded"], "ppo_trainer")
    assert config.actor_rollout_ref.actor.router_replay.mode == "R3"
    off = load_config([f"+{REPLAY}=disabled", f"{ROLLOUT}.enable_rollout_routing_replay=False"], "ppo_trainer")
    assert off.actor_rollout_ref.actor.router_replay.mode == "disabled"
    with naming(ConfigError, "router_replay.mode=R3", "name=sglang", "conflicts"):
        load_config([*command, f"{ROLLOUT}.name=vllm"], "ppo_trainer")
    own = load_config([command[0].replace("R3", "R2"), f"{ROLLOUT}.name=vllm"], "ppo_trainer")
    assert own.actor_rollout_ref.actor.router_replay.mode == "R2"
    with pytest.raises(ConfigError, match=r"read with actor_rollout_ref\.actor\.router_replay\.mode=R3 alone"):
        load_config([command[1]], "ppo_trainer")


def test_losses_of_routers_are_those_that_megatron_adds() -> None:
    """verl sets moe_router_load_balancing_type=none, with which Megatron does not read the weight of the balance."""
    given = f"+{ACTOR}.megatron.override_transformer_config"
    both = [f"{given}.moe_aux_loss_coeff=0.01", f"{given}.moe_z_loss_coeff=0.001"]
    trainer = "ppo_megatron_trainer"
    assert load_config(both, trainer).actor_rollout_ref.actor.strategy_options == {"moe_z_loss_coeff": 0.001}
    kind = f"{given}.moe_router_load_balancing_type"
    config = load_config([*both, f"{kind}=global_aux_loss"], trainer)
    assert config.actor_rollout_ref.actor.strategy_options == {"moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    with naming(ConfigError, "mini-batches"):
        load_config([*both, f"{kind}=seq_aux_loss"], trainer)
    critic = both[1].replace(ACTOR, "critic")
    with naming(ConfigError, "moe_z_loss_coeff=0.001"):
        load_config([critic, "algorithm.adv_estimator=gae"], trainer)


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ("actor_rollout_ref.model.lora_rank", "actor_rollout_ref.model.lora.rank"),
        ("data.tool_config_path", f"{ROLLOUT}.multi_turn.tool_config_path"),
        ("data.train_data_num", "data.train_max_samples"),
        ("reward.sandbox_fusion.max_concurrent", "sandbox_fusion.max_concurrent"),
        ("reward.custom_reward_function.path", "custom_reward_function.path"),
        ("reward.custom_reward_function.name", "custom_reward_function.name"),
        ("reward_model.reward_kwargs.overlong_buffer_cfg.len", "reward_model.overlong_buffer.len"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len", "reward_model.reward_kwargs.overlong_buffer_cfg.len"),
        ("reward.reward_kwargs.max_resp_len", "reward_model.reward_kwargs.max_resp_len"),
        ("reward.reward_model.model_path", "reward_model.model.path"),
        ("reward.reward_model.n_gpus_per_node", "reward_model.n_gpus_per_node"),
        ("reward.reward_model.rollout.tensor_model_parallel_size", "reward_model.rollout.tensor_model_parallel_size"),
        (f"{ACTOR}.optim.min_lr_factor", f"{ACTOR}.optim.min_lr_ratio"),
        ("rollout.nnodes", f"{ROLLOUT}.nnodes"),
        (f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", f"{ROLLOUT}.update_weights_bucket_megabytes"),
        ("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
    ],
)
def test_two_keys_of_the_same_are_equal_or_refused(first: str, other: str) -> None:
    base = defaults_of("0.9.1/fsdp")

    def faults(one: JSON, another: JSON) -> list[str]:
        return [text for text in translate({**base, first: one, other: another}, Config).faults if first in text]

    assert faults(6, 6) == []
    (told,) = faults(6, 12)
    assert_names(told, f"{first}=6", f"{other}=12")


@pytest.mark.parametrize(
    "names",
    list(
        itertools.permutations(["reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name"], 2)
    ),
)
def test_reward_managers_at_two_places_are_one(names: tuple[str, str]) -> None:
    one, other = names
    base = {**defaults_of("0.9.1/fsdp"), "reward_manager.name": None}
    (told,) = translate({**base, one: "dapo", other: "prime"}, Config).faults
    assert_names(told, f"{one}=dapo", f"{other}=prime")
    whole = {**defaults_of("0.9.1/fsdp"), "reward_model.reward_manager": "dapo"}  # "naive" is verl's default
    assert translate(whole, Config).values["reward_model.reward_manager"] == "dapo"


def test_a_default_that_a_command_types_may_not_contradict_either(caplog: pytest.LogCaptureFixture) -> None:
    typed = ["+reward_model.reward_manager=dapo", "+reward.reward_manager.name=naive"]
    with caplog.at_level(logging.WARNING):
        load_config(typed, "ppo_trainer")
    assert_names(caplog.text, "reward_model.reward_manager=dapo", "reward.reward_manager.name=naive")


def test_entries_of_one_mapping_are_equal_or_refused() -> None:
    kwargs = "custom_reward_function.reward_kwargs"
    given: dict[str, JSON] = {kwargs: {"scale": 1, "shift": 2}, f"reward.{kwargs}.scale": 1}
    base = defaults_of("0.9.1/fsdp")
    assert not translate({**base, **given}, Config).faults
    (told,) = translate({**base, **given, f"reward.{kwargs}.shift": 3}, Config).faults
    assert_names(told, kwargs, f"reward.{kwargs}.shift=3")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (f"{ROLLOUT}.tensor_model_parallel_size", 0),
        (f"{ROLLOUT}.tensor_model_parallel_size", "two"),
        (f"{ACTOR}.optim.lr_warmup_steps", 10.5),
        (f"{ACTOR}.optim.lr_warmup_steps", "ten"),
        (f"{ACTOR}.optim.min_lr", "small"),
        (f"{ACTOR}.tis_imp_ratio_cap", "2,0"),
        (f"{ROLLOUT}.multi_turn.max_assistant_turns", "many"),
        ("async_training.trigger_parameter_sync_step", 2.5),
        ("async_training.staleness_threshold", float("nan")),
        ("trainer.logger", ["console", "wandbb"]),
        (f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "two"),
        (f"{ACTOR}.megatron.tensor_model_parallel_size", "two"),
    ],
    ids=str,
)
def test_a_value_that_would_be_left_out_is_refused(key: str, value: JSON) -> None:
    given: dict[str, JSON] = {key: value}
    if key.startswith("async_training"):
        given = {"async_training.staleness_threshold": 0.5, "async_training.require_batches": 1, **given}
    told = "\n".join(translate({**defaults_of("0.9.1/fsdp"), **given}, Config).faults)
    assert_names(told, key, "wandbb" if key == "trainer.logger" else str(value))


APART = {
    **dict.fromkeys(
        ("clip_ratio", "optim.clip_grad", "max_turns", "n_agent", "env.rollout.n"), "its own rule compares them"
    ),
    **dict.fromkeys(("hybrid_engine", "async_training.*", "trainer.v1.*"), "one computation reads all of them"),
    **dict.fromkeys(("gen_batch_size", "max_start_length"), "forks read the other one otherwise"),
    **dict.fromkeys(("rollout.test_freq", "rollout.total_rollout_steps"), "the fully asynchronous trainer's own units"),
    **dict.fromkeys(("gdpo_*", "gigpo.*", "moe_*_coeff", "retriever.*", "max_obs_length"), "parts of one mapping"),
    "rollout_token_veto_threshold": "a criterion among others",
}
"""Keys that share a key of ours with others and are no second names, each with the reason."""


def test_keys_that_become_one_are_second_names_of_it() -> None:
    setters: dict[str, list[str]] = {}
    for key in sorted(known_keys()):
        entry = entry_of(key := key.removesuffix(".*"))
        for name in (key,) if entry is None else entry.ours:
            setters.setdefault(name, []).append(key)
    for keys in setters.values():
        first = [key for key in keys if (entry := entry_of(key)) is None or not entry.second_name_of]
        left = [key for key in first if not any(fnmatch.fnmatchcase(key, f"*{name}") for name in APART)]
        assert len(left) <= 1, left


def test_a_key_of_the_users_replaces_the_default_of_another() -> None:
    model = "actor_rollout_ref.model"
    given: dict[str, JSON] = {f"{model}.lora_alpha": 64, f"{model}.lora.rank": 8, f"{model}.lora_rank": 8}
    found = translate({**given, "dialect": "verl", **base_defaults(), **given}, Config)
    assert f"{model}.lora.alpha" in base_defaults()
    assert found.values[f"{model}.lora_alpha"] == 64 and "lora" not in "".join(found.faults)
    found = translate({**base_defaults(), **given, f"{model}.lora.alpha": 48}, Config)
    (told,) = (text for text in found.faults if "lora" in text)
    assert_names(told, f"{model}.lora.alpha=48", f"{model}.lora_alpha=64")


@pytest.mark.parametrize(("dialect", "ratio"), [("verl", 0.1), ("verl-0.2", None)])
def test_no_steps_of_warm_up_leave_it_to_the_ratio_but_in_the_first_releases(dialect: str, ratio: float | None) -> None:
    keys: dict[str, JSON] = {f"{ACTOR}.optim.lr_warmup_steps": 0, f"{ACTOR}.optim.lr_warmup_steps_ratio": 0.1}
    found = translate({"dialect": dialect, **keys}, Config).values
    assert found.get(f"{ACTOR}.optim.lr_warmup_steps_ratio") == ratio
    assert found.get(f"{ACTOR}.optim.lr_warmup_steps") == (0 if ratio is None else None)
