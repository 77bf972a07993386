"""Keys that conflict, that can have no effect, that do not fit together."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from agentrl.config import SFTConfig, load_config
from agentrl.config.declaration import declaration_of
from agentrl.config.load import write_config
from agentrl.config.registries import ADVANTAGE_ESTIMATORS
from agentrl.config.sections.training import COMPARING
from agentrl.errors import ConfigError
from agentrl.workers.plan import mini_batches
from tests.config.loading import OWN, load
from tests.naming import Names, assert_names, naming

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
VAL = "data.val_files=val.parquet"
GAE = "algorithm.adv_estimator=gae"
INTERACTION = f"{ROLLOUT}.multi_turn.interaction_config_path=interactions/gsm8k.yaml"
REWARD_MODEL = ["reward_model.enable=true", "reward_model.model.path=somewhere"]
JUDGE = "reward_model.judge.base_url=http://h/v1"
SGLANG, ATTACHED = f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.server_urls=[http://h:30000]"

# The key that can have no effect, and what gives it one.
INEFFECTIVE = [
    (f"{ACTOR}.kl_loss_coef=0.5", [f"{ACTOR}.use_kl_loss=true"]),
    (f"{ACTOR}.kl_loss_type=k1", [f"{ACTOR}.use_kl_loss=true"]),
    ("algorithm.kl_penalty=k2", ["algorithm.use_kl_in_reward=true"]),
    ("algorithm.kl_ctrl.kl_coef=0.5", ["algorithm.use_kl_in_reward=true"]),
    ("algorithm.kl_ctrl.target_kl=0.5", ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]),
    ("algorithm.kl_ctrl.horizon=50", ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]),
    ("actor_rollout_ref.model.lora_alpha=32", ["actor_rollout_ref.model.lora_rank=8"]),
    ("actor_rollout_ref.model.target_modules=[q_proj]", ["actor_rollout_ref.model.lora_rank=8"]),
    ("actor_rollout_ref.model.lora_adapter_path=adapter", ["actor_rollout_ref.model.lora_rank=8"]),
    ("actor_rollout_ref.ref.path=other", [f"{ACTOR}.use_kl_loss=true"]),
    ("actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9000", [f"{ACTOR}.use_kl_loss=true"]),
    (f"{ACTOR}.ulysses_sequence_parallel_size=2", ["trainer.n_gpus_per_node=2"]),
    ("actor_rollout_ref.ref.fsdp_config.fsdp_size=2", ["trainer.nnodes=2", f"{ACTOR}.use_kl_loss=true"]),
    ("critic.cliprange_value=0.1", [GAE]),
    ("critic.optim.lr=1e-4", [GAE]),
    ("critic.optim.adamw_lr=1e-4", [GAE, "critic.optim.name=muon"]),
    ("trainer.critic_warmup=3", [GAE]),
    ("algorithm.lam=0.9", [GAE]),
    ("algorithm.gamma=0.9", [GAE]),
    ("algorithm.gamma=0.9", ["algorithm.adv_estimator=reinforce_plus_plus"]),
    (f"{ACTOR}.optim.adamw_lr=1e-4", [f"{ACTOR}.optim.name=muon"]),
    (f"{ACTOR}.optim.min_lr_ratio=0.1", [f"{ACTOR}.optim.lr_scheduler_type=cosine"]),
    ("trainer.resume_from_path=runs/x", ["trainer.resume_mode=resume_path"]),
    (f"{ROLLOUT}.val_kwargs.n=4", [VAL]),
    ("trainer.test_freq=7", [VAL]),
    ("data.val_max_samples=5", [VAL]),
    (f"{ROLLOUT}.multi_turn.max_parallel_calls=2", [f"{ROLLOUT}.multi_turn.tool_config_path=tools/calculator.yaml"]),
    (f"{ROLLOUT}.multi_turn.tool_timeout=2", [f"{ROLLOUT}.multi_turn.tool_config_path=tools/calculator.yaml"]),
    (f"{ROLLOUT}.multi_turn.max_user_turns=2", [INTERACTION]),
    ("reward_model.model.coef=0.5", REWARD_MODEL),
    ("reward_model.max_length=100", REWARD_MODEL),
    ("reward_model.enable_resource_pool=true", REWARD_MODEL),
    ("reward_model.n_gpus_per_node=2", [*REWARD_MODEL, "reward_model.enable_resource_pool=true"]),
    ("reward_model.judge.max_concurrent=5", [JUDGE, "reward_model.judge.model=m"]),
    ("reward_model.judge.data_sources=[x]", [JUDGE, "reward_model.judge.model=m"]),
    ("custom_reward_function.name=f", ["custom_reward_function.path=pyproject.toml"]),
    ("quickstart.train_rows=5", ["data.train_files=quickstart"]),
    ("algorithm.rollout_correction.rollout_is_threshold=3.0", ["algorithm.rollout_correction.rollout_is=token"]),
    ("algorithm.rollout_correction.rollout_is_outside=mask", ["algorithm.rollout_correction.rollout_is=geometric"]),
    ("async_training.depth=1", ["async_training.max_staleness=1", "trainer.save_freq=5"]),
    ("async_training.publish_every=2", ["async_training.max_staleness=1", "trainer.save_freq=5"]),
    ("async_training.keep_kv_cache=true", ["async_training.max_staleness=1", "trainer.save_freq=5", SGLANG]),
    (f"{ROLLOUT}.num_servers=2", [SGLANG]),
    (f"{ROLLOUT}.tensor_model_parallel_size=2", [SGLANG]),
    (f"{ROLLOUT}.gpu_memory_utilization=0.8", [SGLANG]),
    (f"{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3", [SGLANG]),
    (ATTACHED, [SGLANG]),
    (f"{ROLLOUT}.server_start_timeout=60", [SGLANG]),
    (f"{ROLLOUT}.server_start_timeout=60", [SGLANG, ATTACHED]),
    (f"{ROLLOUT}.health_check_interval=1", [SGLANG, ATTACHED]),
    (f"{ROLLOUT}.max_server_restarts=0", [SGLANG]),
    (f"{ROLLOUT}.update_weights_transport=disk", [SGLANG, ATTACHED]),
    (f"{ROLLOUT}.update_weights_bucket_megabytes=64", [SGLANG, ATTACHED]),
    (f"{ROLLOUT}.update_weights_checksum=true", [SGLANG, ATTACHED]),
]


@pytest.mark.usefixtures("sglang_installed")
@pytest.mark.parametrize(("override", "needs"), INEFFECTIVE)
def test_a_key_without_effect_is_refused_until_it_has_one(override: str, needs: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(override)
    key = override.partition("=")[0].removesuffix(".attention_backend")
    assert str(error.value).startswith(f"{key}=")
    assert_names(error.value, "no effect")
    load(override, *needs)


@pytest.mark.parametrize(
    "overrides",
    [
        ["algorithm.adv_estimator=gae", "algorithm.norm_adv_by_std_in_grpo=false"],
        ["algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=false"],
        [VAL, f"{ROLLOUT}.val_kwargs.do_sample=false", f"{ROLLOUT}.val_kwargs.temperature=0.5"],
        [JUDGE, "reward_model.judge.model=m", "custom_reward_function.path=pyproject.toml"],
        [
            f"{ACTOR}.use_kl_loss=true",
            "trainer.nnodes=2",
            "actor_rollout_ref.model.lora_rank=8",
            "actor_rollout_ref.ref.fsdp_config.fsdp_size=2",
        ],
        ["trainer.device=cpu", f"{ACTOR}.fsdp_config.param_offload=true"],
        [f"{ACTOR}.policy_loss.loss_mode=gspo", f"{ACTOR}.clip_ratio_c=2.5"],
    ],
)
def test_keys_that_another_key_switches_off(overrides: list[str]) -> None:
    load(*overrides[:-1])
    with naming(ConfigError, "no effect"):
        load(*overrides)


def test_load_config_checks() -> None:
    with naming(ConfigError, "critic.ppo_epochs=2", "algorithm.adv_estimator=gae", "no effect"):
        load_config([*OWN, "critic.ppo_epochs=2"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.lora_alpha=32"], ("model.lora_alpha=32", "model.lora_rank", "no effect")),
        (["ulysses_sequence_parallel_size=2"], ("ulysses_sequence_parallel_size=2", "trainer.nnodes", "no effect")),
        (["model.fsdp_config.fsdp_size=2"], ("fsdp_size=2", "trainer.nnodes", "no effect")),
        (
            ["trainer.device=cpu", "model.fsdp_config.param_offload=true"],
            ("param_offload=true", "trainer.device=cuda", "no effect"),
        ),
        (["trainer.checkpoint.async_save=true"], ("async_save=true", "trainer.save_freq", "no effect")),
        (
            ["trainer.n_gpus_per_node=8", "ulysses_sequence_parallel_size=3"],
            ("ulysses_sequence_parallel_size=3", "model.fsdp_config.tensor_parallel_size=1", "8 ranks"),
        ),
        (
            ["trainer.n_gpus_per_node=8", "model.fsdp_config.tensor_parallel_size=2", "model.lora_rank=8"],
            ("model.lora_rank=8", "model.fsdp_config.tensor_parallel_size=2", "conflicts"),
        ),
    ],
)
def test_supervised_training_is_checked_too(overrides: list[str], message: Names) -> None:
    with naming(ConfigError, message):
        load_config(["data.train_files=a.parquet", "model.path=m", *overrides], "sft", SFTConfig)


def test_what_the_recipes_set_is_not_held_against_the_user() -> None:
    """The quickstart's recipe may set validation keys; switching validation off must still work."""
    assert load_config(["data.val_files=null"]).data.val_files is None


@pytest.mark.parametrize("override", [f"{ACTOR}.kl_loss_coef=0.001", "algorithm.lam=1.0", "data.val_batch_size=7"])
def test_a_key_that_is_set_to_its_default_is_set(override: str) -> None:
    with naming(ConfigError, override, "no effect"):
        load(override)


def test_a_default_that_asks_for_nothing_may_be_set() -> None:
    """As launch scripts do."""
    load(
        "trainer.critic_warmup=0",
        f"{ACTOR}.fsdp_config.param_offload=false",
        "trainer.device=cpu",
        f"{ACTOR}.ulysses_sequence_parallel_size=1",
        "reward_model.judge.data_sources=[]",
        "tools.cassette_path=null",
    )


@pytest.mark.parametrize("bound", ["clip_ratio_low=0.1", "clip_ratio_high=0.3"])
def test_clip_ratio_conflicts_with_either_bound(bound: str) -> None:
    """Even at the default's value: with the bounds given, clip_ratio could change nothing."""
    with pytest.raises(ConfigError) as error:
        load(f"{ACTOR}.clip_ratio=0.2", f"{ACTOR}.{bound}")
    assert f"{ACTOR}.clip_ratio=0.2 conflicts with {ACTOR}.{bound}" in str(error.value)


@pytest.mark.parametrize(
    ("overrides", "low", "high"),
    [
        ([], 0.2, 0.2),
        (["clip_ratio=0.1"], 0.1, 0.1),
        (["clip_ratio_low=0.1"], 0.1, 0.2),
        (["clip_ratio_high=0.28"], 0.2, 0.28),
        (["clip_ratio_low=0.1", "clip_ratio_high=0.3"], 0.1, 0.3),
    ],
)
def test_the_clip_bounds_that_hold(overrides: list[str], low: float, high: float) -> None:
    actor = load(*(f"{ACTOR}.{override}" for override in overrides)).actor_rollout_ref.actor
    assert (actor.clip_low, actor.clip_high) == (low, high)


@pytest.mark.parametrize(
    ("batch", "mini", "near"), [(32, 9, "8 and 11"), (30, 16, "15 and 30"), (7, 5, "4 and 7"), (8, 64, "8")]
)
def test_a_batch_splits_evenly_into_mini_batches(batch: int, mini: int, near: str) -> None:
    with pytest.raises(ConfigError) as error:
        load(f"data.train_batch_size={batch}", f"{ACTOR}.ppo_mini_batch_size={mini}")
    assert_names(
        error.value, f"{ACTOR}.ppo_mini_batch_size={mini}", "mini-batch", f"data.train_batch_size={batch}", near
    )


def test_ten_mini_batches_of_512_prompts_have_51_or_52() -> None:
    config = load("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=52")
    plan = mini_batches(torch.arange(512), config.actor_rollout_ref.actor.ppo_mini_batch_size, None)
    assert sorted(map(len, plan)) == [51] * 8 + [52] * 2


def test_the_critics_mini_batch_is_one_of_the_batch_too() -> None:
    with naming(ConfigError, "critic.ppo_mini_batch_size=9"):
        load(GAE, "data.train_batch_size=32", "critic.ppo_mini_batch_size=9")


def test_the_context_must_hold_prompt_and_response() -> None:
    fits = ["data.max_prompt_length=100", "data.max_response_length=28"]
    load(*fits, f"{ROLLOUT}.max_model_len=128")
    with pytest.raises(ConfigError, match=r"100 \+ 28 = 128"):
        load(*fits, f"{ROLLOUT}.max_model_len=127")


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["trainer.resume_mode=resume_path"], "trainer.resume_from_path"),
        (["trainer.val_only=true"], "data.val_files"),
        ([JUDGE], "reward_model.judge.model"),
        (["reward_model.enable=true"], "reward_model.model.path"),
        ([JUDGE, "reward_model.judge.model=m", "reward_model.timeout=30"], "judge.timeout=30"),
        (
            [VAL, f"{ROLLOUT}.val_kwargs.do_sample=false", f"{ROLLOUT}.val_kwargs.greedy=false"],
            "validated",
        ),
    ],
)
def test_what_is_missing_beside_a_key(overrides: list[str], says: Names) -> None:
    with pytest.raises(ConfigError) as error:
        load(*overrides)
    assert_names(error.value, says)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=3"], ("actor.ulysses_sequence_parallel_size=3", "8 ranks")),
        (
            [f"{ACTOR}.ulysses_sequence_parallel_size=4", f"{ACTOR}.fsdp_config.tensor_parallel_size=4"],
            ("ulysses_sequence_parallel_size=4", "fsdp_config.tensor_parallel_size=4", "8 ranks"),
        ),
        ([f"{ACTOR}.fsdp_config.fsdp_size=3"], ("actor.fsdp_config.fsdp_size=3", "8 ranks")),
        (
            [GAE, "critic.model.fsdp_config.fsdp_size=8", "critic.model.fsdp_config.tensor_parallel_size=2"],
            ("critic.model.fsdp_config.fsdp_size=8", "8 ranks", "role /", "tensor_parallel_size=2"),
        ),
        (
            [f"{ACTOR}.fsdp_config.tensor_parallel_size=2", "actor_rollout_ref.model.lora_rank=8"],
            ("actor_rollout_ref.model.lora_rank=8", ".tensor_parallel_size=2", "conflicts"),
        ),
        (
            [GAE, f"{ACTOR}.use_torch_compile=true", "critic.model.fsdp_config.tensor_parallel_size=2"],
            ("use_torch_compile=true", "critic.model.fsdp_config.tensor_parallel_size=2", "conflicts"),
        ),
    ],
)
def test_ranks_that_cannot_be_arranged_so(overrides: list[str], says: Names) -> None:
    with naming(ConfigError, says):
        load(*OWN, "trainer.nnodes=2", "trainer.n_gpus_per_node=4", *overrides)


FREED = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.free_cache_engine=true", "trainer.device=cuda"]


@pytest.mark.usefixtures("sglang_installed")
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["async_training.depth=3"], ("depth=3", "async_training.max_staleness=2", "max_staleness")),
        (["async_training.publish_every=4"], ("publish_every=4", "async_training.max_staleness=2")),
        (
            ["trainer.save_freq=-1"],
            ("save_freq=-1", "async_training.max_staleness=2", "conflicts"),
        ),
        ([*FREED, "async_training.keep_kv_cache=true"], ("keep_kv_cache=true", "free_cache_engine=true", "conflicts")),
        (
            [*FREED, "async_training.publish_every=2"],
            ("publish_every=2", "free_cache_engine=true", "publish_every=1", "conflicts"),
        ),
        (
            [*FREED, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.nnodes=2"],
            ("max_staleness=2", "nnodes=2", "free_cache_engine=true", "conflicts"),
        ),
        (["algorithm.rollout_correction.proximal=published"], ("proximal=published", "publish_every", "above")),
        (
            ["algorithm.rollout_correction.proximal=published", "async_training.publish_every=2"],
            ("save_freq=5", "proximal=published", "publish_every=2", "conflicts"),
        ),
    ],
)
def test_a_bound_on_staleness_that_cannot_hold(overrides: list[str], says: Names) -> None:
    keys = ["async_training.max_staleness=2", "trainer.save_freq=5"]
    load(*keys, "async_training.depth=2", "async_training.publish_every=3")
    load(*keys, f"{ROLLOUT}.name=sglang")
    load(*keys, *FREED)
    load(*keys, "trainer.n_gpus_per_node=2", f"{ROLLOUT}.nnodes=2")
    with naming(ConfigError, says):
        load(*keys, *overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["rollout_is=token", "rollout_is_lower=3"], ("rollout_is_lower=3", "rollout_is_threshold=2")),
        (["rollout_is=token", "proximal=rollout"], ("loss_mode=gpg", "twice")),
        (["rollout_is=token", f"{LOSS}=m2po"], ("loss_mode=m2po", "conflicts")),
        (
            ["rollout_is=token", "rollout_is_batch_normalize=true", "proximal=interpolated"],
            ("rollout_is_batch_normalize=true", "proximal=interpolated", "proximal=recomputed", "conflicts"),
        ),
        (
            ["rollout_is=tempered", "proximal=interpolated"],
            ("rollout_is=tempered", "proximal=interpolated", "proximal=recomputed", "conflicts"),
        ),
        (["reject.token=2"], ("token", "[lower, upper]")),
        (["reject.tokens=2"], ("reject:", "'token'", "found 'tokens'")),
    ],
)
def test_corrections_that_cannot_be(overrides: list[str], says: Names) -> None:
    with naming(ConfigError, says):
        section = "algorithm.rollout_correction."
        load(*(override if override.startswith(LOSS) else section + override for override in overrides))


def test_a_loss_without_an_option_that_it_needs() -> None:
    with pytest.raises(ConfigError, match=r"policy_loss.options: .*dro_beta"):
        load(f"{LOSS}=dro")


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ([], r"the correction is rollout_is=tempered \(truncate at 2\): watch correction/ess"),
        (["rollout_is=null"], "nothing corrects for that: set algorithm.rollout_correction.rollout_is=tempered"),
        (["reject.token_k3=0.1"], "the correction is reject.token_k3=0.1: watch"),
        (["rollout_is=token", "reject.veto=1e-4"], r"rollout_is=token \(truncate at 2\), reject.veto=0.0001"),
        (["proximal=interpolated"], "the correction is proximal=interpolated: watch"),
    ],
)
def test_stale_tokens_are_told_with_their_correction(
    keys: list[str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = [f"algorithm.rollout_correction.{key}" for key in keys]
    load_config([*OWN, "async_training.max_staleness=1", "trainer.save_freq=5", *given])
    assert re.search(says, caplog.text)


def test_stale_tokens_are_corrected_unless_that_was_chosen_otherwise(tmp_path: Path) -> None:
    """What was chosen stays chosen where a run's own config is loaded again."""
    stale, correction = ["async_training.max_staleness=1", "trainer.save_freq=5"], "algorithm.rollout_correction."
    for given, expected in (
        ([], None),
        (stale, "tempered"),
        ([*stale, "data.max_response_length=4096"], "tempered"),
        ([*stale, f"{correction}rollout_is=sequence"], "sequence"),
        ([*stale, f"{correction}rollout_is=null"], None),
        ([*stale, f"{LOSS}=m2po"], None),
    ):
        config = load_config([*OWN, *given])
        assert config.algorithm.rollout_correction.rollout_is == expected, given
        write_config(config, tmp_path / "config.yaml")
        again = load_config(["--config-path", str(tmp_path), "--config-name", "config"])
        assert again == config, given
    config = load_config(["--config-path", str(tmp_path), "--config-name", "config", f"{LOSS}=vanilla", stale[0]])
    assert config.algorithm.rollout_correction.rollout_is == "tempered", "the bound is given anew"


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (
            ["top_p=0.9"],
            r"rollout.top_p=0.9: training .* by up to 0\.11 nats a token \(KL\); rollout/logprob_gap",
        ),
        (["top_k=50"], r"rollout.top_k=50: training samples from a filtered distribution.* which differs; rollout/log"),
        (["top_p=0.95", "top_k=20"], r"rollout.top_p=0.95 and top_k=20: .* by up to 0\.051 nats"),
        (["val_kwargs.top_p=0.9", "val_kwargs.top_k=50"], ""),
        (["top_p=1.0", "top_k=0"], ""),
    ],
)
def test_filters_of_training_are_told_with_what_they_cost(
    keys: list[str], says: str, caplog: pytest.LogCaptureFixture
) -> None:
    given = [*OWN, "data.val_files=rows.parquet", *(f"actor_rollout_ref.rollout.{key}" for key in keys)]
    load_config(given)
    assert re.search(says, caplog.text) if says else "filtered" not in caplog.text
    caplog.clear()
    load_config([*given, "trainer.val_only=true"])
    assert "filtered" not in caplog.text


def test_one_trajectory_a_prompt_is_told_to_have_no_baseline(caplog: pytest.LogCaptureFixture) -> None:
    one, many = "actor_rollout_ref.rollout.n=1", "actor_rollout_ref.rollout.n=2"
    for estimator in ("grpo", "rloo"):
        caplog.clear()
        load(one, f"algorithm.adv_estimator={estimator}")
        assert caplog.text.count(f"n=1 with algorithm.adv_estimator={estimator}: ") == 1
        assert_names(caplog.text, "no baseline")
    caplog.clear()
    load(many, "algorithm.adv_estimator=grpo")
    load(one, "algorithm.adv_estimator=reinforce_plus_plus")
    assert "baseline" not in caplog.text


def test_the_estimators_that_compare_a_group_are_all_known() -> None:
    """online_dpo refuses one trajectory a prompt."""
    names = [name for name in ADVANTAGE_ESTIMATORS.names() if ADVANTAGE_ESTIMATORS.is_built_in(name)]
    comparing = {name for name in names if declaration_of(ADVANTAGE_ESTIMATORS.get(name)).compares_group}
    assert comparing - {"online_dpo"} == COMPARING


def test_a_cluster_that_runs_has_its_cpus() -> None:
    with pytest.raises(ConfigError, match=r"ray_init\.num_cpus=2 conflicts with ray_init\.address=auto"):
        load("trainer.n_gpus_per_node=2", "ray_init.num_cpus=2", "ray_init.address=auto")
    with pytest.raises(ConfigError, match=r"ray_init\.include_dashboard=true conflicts with ray_init\.address=auto"):
        load("trainer.n_gpus_per_node=2", "ray_init.include_dashboard=true", "ray_init.address=auto")
    load("trainer.n_gpus_per_node=2", "ray_init.address=auto")  # include_dashboard is false by itself


def test_a_clip_ratio_that_is_the_bound_is_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    load("actor_rollout_ref.actor.clip_ratio_high=1.2")
    assert_names(caplog.text, "[..., 2.2]", "1.2", "0.2")
    caplog.clear()
    load("actor_rollout_ref.actor.clip_ratio_high=0.28")
    assert not caplog.text


@pytest.mark.parametrize("format", ["auto", "none", "hermes", "template:hermes", "qwen3"])
def test_chat_formats_that_there_are(format: str) -> None:
    assert load(f"actor_rollout_ref.rollout.multi_turn.format={format}")


@pytest.mark.parametrize("format", ["hermess", "template:qwen", "json"])
def test_an_unknown_chat_format_is_told_with_the_config(format: str) -> None:
    with pytest.raises(ConfigError, match=rf"multi_turn\.format='{format}' is unknown; nearest: "):
        load(f"actor_rollout_ref.rollout.multi_turn.format={format}")


def test_epochs_may_stand_beside_steps() -> None:
    assert load("trainer.total_epochs=3", "trainer.total_training_steps=7").trainer.total_training_steps == 7


def test_a_target_of_the_entropy_needs_the_entropy_before_the_update() -> None:
    with pytest.raises(ConfigError, match=r"target_entropy=0.2 conflicts with .*proximal=rollout.*=recomputed"):
        load_config([f"{ACTOR}.target_entropy=0.2", "algorithm.rollout_correction.proximal=rollout"])


def test_experts_are_not_replayed_by_compiled_layers() -> None:
    replay = f"{ACTOR}.router_replay.mode=R3"
    with pytest.raises(ConfigError, match=r"router_replay\.mode=R3 conflicts with .*use_torch_compile=true"):
        load_config([replay, f"{ACTOR}.use_torch_compile=true"])
    assert load_config([replay]).actor_rollout_ref.actor.router_replay.mode == "R3"


def test_the_trainers_experts_are_those_of_a_pass_before_the_update() -> None:
    replay = f"{ACTOR}.router_replay.mode=R2"
    with naming(ConfigError, "mode=R2", "proximal=rollout", "conflicts"):
        load_config([replay, "algorithm.rollout_correction.proximal=rollout"])
    assert load_config([replay]).actor_rollout_ref.actor.router_replay.mode == "R2"


def test_weights_that_later_updates_build_on_are_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.config.installed.is_installed", lambda _: True)
    freed = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.free_cache_engine=true", "trainer.device=cuda"]
    lora = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora_merge=false"]
    for keys, all_freed in (([], True), ([f"{ROLLOUT}.update_weights_delta=true"], False), (lora, False)):
        assert load_config([*freed, *keys]).frees_weights is all_freed


def test_entries_of_mappings_keep_the_rules_of_their_keys() -> None:
    """As the same keys do outside of a mapping."""
    roles, teachers = f"{ROLLOUT}.roles", "distillation.by_source"
    frozen = "{policy: small, base_url: 'http://h/v1', temperature: 0.3}"
    load(f"{roles}={{white: {{}}, black: {frozen}}}")
    load(f"{teachers}={{a/*: {{base_url: u, tokenizer: t, timeout: 3}}}}")
    for key, entry, names in (
        (f"{roles}.white", "{temperature: 0.3}", "temperature=0.3 base_url"),
        (f"{roles}.white", "{policy: mine, adapter: folder, max_tokens: 3}", "max_tokens=3 base_url"),
        (f"{teachers}.a/*", "{path: t, timeout: 3}", "timeout=3.0 base_url"),
        (f"{teachers}.a/*", "{base_url: u, tokenizer: t, api: echo}", "api=echo model"),
    ):
        mapping, _, name = key.rpartition(".")
        other = ", black: {}" if mapping == roles else ""
        given, needed = names.split()
        with naming(ConfigError, f"{key}.{given}", f"{key}.{needed}"):
            load(f"{mapping}={{{name}: {entry}{other}}}")


def test_numbers_are_neither_true_nor_false() -> None:
    for key in ("actor_rollout_ref.model.lora_rank", "trainer.save_freq", f"{ACTOR}.optim.lr", "trainer.budget.tokens"):
        with naming(ConfigError, key, "a number, found true"):
            load(f"{key}=true")
    load(f"{ACTOR}.use_torch_compile=false", "actor_rollout_ref.model.enable_gradient_checkpointing=true")


@pytest.mark.parametrize("betas", ["[0.9,1.5]", "[-1,0.5]"])
def test_betas_that_no_optimizer_takes(betas: str) -> None:
    with naming(ConfigError, f"{ACTOR}.optim.betas", betas.strip("[]").split(",")[betas.startswith("[0")]):
        load(f"{ACTOR}.optim.betas={betas}")
