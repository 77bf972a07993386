"""What commands of each family make the trainer do, against the formulas of that family's code."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError
from agentrl.system.json_value import JSON
from agentrl.verl.launch import CONFIGS, arguments
from benchmarks.verl.quantities import different, of_verl, ours
from benchmarks.verl.release_steps import ACTOR, ROLLOUT, Release
from benchmarks.verl.values import values_of
from tests.naming import Names, assert_names, naming

MAIN, DAPO, FULLY_ASYNC = "verl.trainer.main_ppo", "recipe.dapo.main_dapo", "recipe.fully_async_policy.fully_async_main"
ONE_STEP_OFF = "recipe.one_step_off_policy.main_ppo"
SERVER = f"{ROLLOUT}.server_urls=[http://127.0.0.1:30000]"


def taken(words: list[str], module: str = MAIN) -> Config:
    return load_config(arguments([*words, SERVER], CONFIGS[module]))


QUICKSTART = [
    "data.train_batch_size=256",
    f"{ACTOR}.optim.lr=1e-6",
    f"{ACTOR}.ppo_mini_batch_size=64",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    "critic.optim.lr=1e-5",
    "critic.ppo_micro_batch_size_per_gpu=4",
    "algorithm.kl_ctrl.kl_coef=0.001",
    "trainer.save_freq=10",
    "trainer.test_freq=10",
    "trainer.total_epochs=15",
]
GRPO = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=1024",
    f"{ACTOR}.ppo_mini_batch_size=256",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_coef=0.01",
    f"{ACTOR}.optim.lr_warmup_steps_ratio=0.1",
    f"{ACTOR}.ppo_epochs=2",
    f"{ROLLOUT}.n=5",
]
TINY_ZERO = [
    "data.train_batch_size=256",
    "data.val_batch_size=1312",
    f"{ACTOR}.optim.lr=1e-6",
    f"{ACTOR}.ppo_mini_batch_size=128",
    f"{ACTOR}.ppo_micro_batch_size=8",
    f"{ROLLOUT}.log_prob_micro_batch_size=8",
    f"{ROLLOUT}.tensor_model_parallel_size=1",
    "actor_rollout_ref.ref.log_prob_micro_batch_size=4",
    "critic.optim.lr=1e-5",
    "critic.ppo_micro_batch_size=8",
    "algorithm.kl_ctrl.kl_coef=0.002",
    "+trainer.val_before_train=False",
    "trainer.default_hdfs_dir=null",
    "trainer.save_freq=100",
    "trainer.test_freq=30",
]
FIRST_GRPO = [
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.ppo_micro_batch_size=128",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.clip_ratio=0.3",
    f"{ROLLOUT}.n=4",
]
SEARCH = [
    "data.train_batch_size=512",
    "data.max_prompt_length=4096",
    "data.max_response_length=500",
    "data.max_start_length=2048",
    "data.max_obs_length=500",
    f"{ACTOR}.optim.lr=1e-6",
    f"{ACTOR}.ppo_mini_batch_size=256",
    f"{ACTOR}.ppo_micro_batch_size=64",
    f"{ACTOR}.state_masking=true",
    f"{ROLLOUT}.temperature=1",
    "max_turns=2",
    "retriever.topk=3",
]
SEARCH_GRPO = [*SEARCH, "algorithm.adv_estimator=grpo", f"{ACTOR}.use_kl_loss=true", f"{ROLLOUT}.n_agent=5"]
SEARCH_PPO = [*SEARCH, "algorithm.adv_estimator=gae", f"{ROLLOUT}.n_agent=1", "critic.ppo_micro_batch_size=8"]
RECIPE = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=512",
    "data.gen_batch_size=1536",
    f"{ACTOR}.ppo_mini_batch_size=32",
    f"{ACTOR}.clip_ratio_low=0.2",
    f"{ACTOR}.clip_ratio_high=0.28",
    f"{ACTOR}.clip_ratio_c=10.0",
    f"{ROLLOUT}.n=16",
    "algorithm.filter_groups.enable=True",
    "algorithm.filter_groups.metric=acc",
    "algorithm.filter_groups.max_num_gen_batches=10",
]
FAMILIES: dict[str, tuple[str, list[str], Release, dict[str, JSON]]] = {
    "main, ppo": (MAIN, QUICKSTART, "main", {}),
    "main, grpo": (MAIN, GRPO, "main", {}),
    "main, defaults": (MAIN, [], "main", {}),
    "main, a clip alone": (MAIN, [f"{ACTOR}.clip_ratio=0.5"], "main", {}),
    "main, the first name": (MAIN, [*FIRST_GRPO, "algorithm.use_kl_in_reward=False"], "main", {}),
    "0.2, ppo": (MAIN, TINY_ZERO, "0.2", {}),
    "0.2, grpo": (MAIN, FIRST_GRPO, "0.2", {}),
    "0.2, several a prompt with a critic": (MAIN, [*TINY_ZERO, f"{ROLLOUT}.n=4"], "0.2", {}),
    "0.2, of Megatron": (MAIN, [*TINY_ZERO, "--config-path=config", "--config-name=ppo_megatron_trainer"], "0.2", {}),
    "Search-R1, grpo": (MAIN, SEARCH_GRPO, "search_r1", {}),
    "Search-R1, ppo": (MAIN, SEARCH_PPO, "search_r1", {}),
    "dapo": (DAPO, RECIPE, "main", {}),
    "dapo, all of a generation batch": (DAPO, [*RECIPE[:3], *RECIPE[3:8]], "main", {"data.train_batch_size": 1536}),
    "fully asynchronous": (
        FULLY_ASYNC,
        [f"{ACTOR}.ppo_mini_batch_size=32", "async_training.require_batches=4", "algorithm.adv_estimator=grpo"],
        "main",
        {"data.train_batch_size": 128},
    ),
    "one step off": (ONE_STEP_OFF, ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=8"], "main", {}),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_command_makes_the_trainer_do_what_its_own_code_does(name: str) -> None:
    module, words, release, counted = FAMILIES[name]
    keys = [word for word in words if not word.startswith("--")]
    assert different(taken(words, module), values_of(keys, release) | counted, release) == []


def test_the_formulas_of_families_differ() -> None:
    """The numbers that hold, so that a formula that agrees with a mistake of ours does not pass."""
    grpo = of_verl(values_of(SEARCH_GRPO, "search_r1"), "search_r1")
    assert grpo["the policy's optimizer steps a batch"] == 10 and grpo["sequences a batch"] == 2560
    assert grpo["reward of a token"] == 1.0
    ppo, tiny = ours(taken(SEARCH_PPO)), ours(taken(TINY_ZERO))
    assert (ppo["reward of a token"], ppo["the policy's optimizer steps a batch"]) == (1 - 0.001 * 0.3, 2)
    assert (tiny["reward of a token"], tiny["validations"]) == (1 - 0.002 * 0.3, [30, 60, 90, 100])
    several = ours(taken([*TINY_ZERO, f"{ROLLOUT}.n=4"]))
    assert several["the policy's optimizer steps a batch"] == 2
    assert several["the critic's optimizer steps a batch"] == 8
    quick = ours(taken(QUICKSTART))
    assert (quick["reward of a token"], quick["the policy's optimizer steps a batch"]) == (1.0, 4)
    assert ours(taken(QUICKSTART[:-3]))["validations"] == []
    assert ours(taken(SEARCH_PPO))["validations"] == [100]
    loss = tiny["loss of tokens"]
    assert isinstance(loss, list) and loss[-1] == 5.0 - 0.001 * 1.5, "no dual clip"


def test_the_quickstarts_kl_coefficient_is_no_sign_of_an_old_release() -> None:
    """verl's own quickstart names kl_ctrl.kl_coef without use_kl_in_reward, and has no KL in its reward."""
    assert "algorithm.kl_ctrl.kl_coef=0.001" in QUICKSTART
    config = taken(QUICKSTART)
    assert not config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.entropy_coeff == 0


def test_a_command_of_a_first_release_says_at_the_start_what_holds(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        taken(TINY_ZERO)
    (told,) = [text for text in caplog.messages if text.startswith("dialect=verl-0.2: the defaults of verl 0.2 hold")]
    assert_names(told, "kl_coef=0.002", "entropy_coeff", "0.001")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        taken(SEARCH_GRPO)
    (told,) = [text for text in caplog.messages if text.startswith("dialect=verl-0.2: the defaults of Search-R1's")]
    assert "(here it is not)" in told
    (told,) = [text for text in caplog.messages if text.startswith(f"{ACTOR}.ppo_mini_batch_size, critic.ppo_mini")]
    assert_names(told, "52")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        taken(QUICKSTART)
    assert not [text for text in caplog.messages if "dialect=" in text or "Mini-batches hold" in text]


@pytest.mark.parametrize("later", [f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.loss_agg_mode=token-mean"])
def test_keys_of_two_ages_are_refused_until_the_command_says_which(later: str) -> None:
    with pytest.raises(ConfigError) as error:
        taken([*TINY_ZERO, later])
    line = str(error.value).splitlines()[0]
    assert line.startswith(f"{ACTOR}.ppo_micro_batch_size=8, ") and "critic.ppo_micro_batch_size=8" in line, line
    assert "algorithm.use_kl_in_reward=true or false" in line
    config = taken([*TINY_ZERO, later, "algorithm.use_kl_in_reward=False"])
    assert not config.algorithm.use_kl_in_reward and config.actor_rollout_ref.actor.entropy_coeff == 0


def test_a_file_that_builds_on_the_trainer_is_judged_by_its_keys_too(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\nactor_rollout_ref: {actor: {ppo_micro_batch_size: 8}}\n"
    )
    words = [f"--config-path={tmp_path}", "--config-name=mine"]
    with pytest.raises(ConfigError, match=r"algorithm\.use_kl_in_reward=true or false"):
        taken(words)
    taken([*words, "algorithm.use_kl_in_reward=true"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*SEARCH_GRPO, f"{ACTOR}.ppo_mini_batch_size=200"], ("512 prompts", "prompts x", "5 trajectories")),
        ([*SEARCH_GRPO, f"{ROLLOUT}.n=5"], "n_agent"),
        ([*SEARCH_GRPO, f"{ACTOR}.state_masking=false"], "state_masking=true"),
        ([*TINY_ZERO, f"{ACTOR}.ppo_epochs=2"], "ppo_epochs"),
        ([*TINY_ZERO, f"{ACTOR}.optim.warmup_style=cosine"], "constant"),
    ],
)
def test_what_a_first_release_would_not_do_is_refused(words: list[str], said: Names) -> None:
    with naming(ConfigError, said):
        taken(words)
