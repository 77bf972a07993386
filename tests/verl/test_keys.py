"""Launch scripts written for verl, and its keys in configs of ours."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from tests.naming import Names, assert_names, naming

# verl's multi-turn GSM8K example for GRPO, trained on one GPU, with SGLang over two.
LAUNCH = [
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=256",
    "data.max_prompt_length=1024",
    "data.max_response_length=1024",
    "data.filter_overlong_prompts=True",
    "data.truncation='error'",
    "data.return_raw_chat=True",
    "actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct",
    "actor_rollout_ref.actor.optim.lr=1e-6",
    "actor_rollout_ref.model.use_remove_padding=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.kl_loss_coef=0.001",
    "actor_rollout_ref.actor.kl_loss_type=low_var_kl",
    "actor_rollout_ref.actor.entropy_coeff=0",
    "actor_rollout_ref.model.enable_gradient_checkpointing=True",
    "actor_rollout_ref.actor.fsdp_config.param_offload=False",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    "actor_rollout_ref.rollout.name=sglang",
    "actor_rollout_ref.rollout.mode=async",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.6",
    "actor_rollout_ref.rollout.free_cache_engine=True",
    "actor_rollout_ref.rollout.multi_stage_wake_up=True",
    "actor_rollout_ref.rollout.update_weights_bucket_megabytes=1024",
    "+actor_rollout_ref.rollout.engine_kwargs.sglang.attention_backend=fa3",
    "actor_rollout_ref.rollout.n=16",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=32",
    "actor_rollout_ref.ref.fsdp_config.param_offload=True",
    "algorithm.use_kl_in_reward=False",
    "trainer.critic_warmup=0",
    'trainer.logger=["console","wandb"]',
    "trainer.project_name='gsm8k_async_rl'",
    "trainer.experiment_name='qwen2.5-3b_function_rm-gsm8k-sgl-multi-w-tool-verify-n16'",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=1",
    "trainer.save_freq=-1",
    "trainer.test_freq=20",
    "data.train_files=/data/gsm8k/train.parquet",
    "data.val_files=/data/gsm8k/test.parquet",
    "actor_rollout_ref.rollout.multi_turn.tool_config_path=TOOLS",
    "trainer.total_epochs=15",
]


@pytest.mark.usefixtures("sglang_installed")
def test_a_launch_script_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tools = tmp_path / "gsm8k_tool_config.yaml"
    tools.write_text("tools: []\n")
    # The script starts from its own YAML, as verl's does.
    (tmp_path / "gsm8k_multiturn_grpo.yaml").write_text(
        "hydra:\n  searchpath:\n    - file://verl/trainer/config\n"
        "defaults:\n  - ppo_trainer\n  - _self_\n"
        "data:\n  max_prompt_length: 1024\n  return_raw_chat: True\n"
        "actor_rollout_ref:\n  hybrid_engine: True\n  rollout:\n    multi_turn:\n      enable: True\n"
        "      max_assistant_turns: 5\n"
    )
    argv = [f"--config-path={tmp_path}", "--config-name=gsm8k_multiturn_grpo"]
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        config = load_config([*argv, *(text.replace("TOOLS", str(tools)) for text in LAUNCH)])
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size, rollout.n) == (256, 256, 16)
    assert (actor.optim.lr, actor.use_kl_loss, actor.kl_loss_coef, actor.entropy_coeff) == (1e-6, True, 0.001, 0.0)
    assert (rollout.name, rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization) == ("sglang", 2, 0.6)
    assert (rollout.free_cache_engine, rollout.update_weights_bucket_megabytes) == (True, 1024)
    assert rollout.engine_kwargs.sglang == {"attention_backend": "fa3"}
    assert rollout.multi_turn.max_assistant_turns == 5
    assert rollout.multi_turn.tool_config_path == str(tools)
    assert (config.trainer.logger, config.trainer.total_epochs) == (["console", "wandb", "jsonl"], 15)
    assert config.trainer.default_local_dir.endswith("/qwen2.5-3b_function_rm-gsm8k-sgl-multi-w-tool-verify-n16")
    assert config.algorithm.adv_estimator == "grpo"
    assert rollout.multi_turn.max_tool_response_length == 256
    assert rollout.multi_turn.tool_response_unit == "characters", "the file builds on verl's, and has its units"
    told = [record.getMessage() for record in caplog.records]
    assert any("keys of verl's have no effect of their own here" in text for text in told)
    assert "without effect in this command: trainer.critic_warmup=0" not in "".join(told)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("actor_rollout_ref.rollout.logprobs_mode=raw_logprobs", "logits / temperature"),
        ("actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=mine", "update_weights_transport"),
        ("critic.model.lora_rank=16", "parameters"),
        ("actor_rollout_ref.rollout.response_length=128", "data.max_response_length"),
        ("actor_rollout_ref.actor.optim.clip_grad=0.5", "grad_clip"),
        ("critic.model.path=x", "critic.path"),
        ("trainer.default_hdfs_dir=hdfs://x", "trainer.default_remote_dir"),
        ("trainer.max_ckpt_to_keep=3", "trainer.max_actor_ckpt_to_keep"),
    ],
)
def test_a_value_that_asks_for_something_else_is_refused(override: str, says: Names) -> None:
    with pytest.raises(ConfigError) as error:
        load_config([override])
    message = str(error.value)
    assert message.startswith(override.partition("=")[0]), message
    assert_names(message, says)


def test_another_engine_is_refused_by_the_name_of_ours() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(["actor_rollout_ref.rollout.name=trtllm"])
    message = str(error.value)
    assert_names(message, "actor_rollout_ref.rollout.name", "'trtllm'", "unknown")
    assert_names(message, "embedded, mixed, sglang, vllm", "docs/engines.md")
    with naming(ConfigError, "vLLM", "name=sglang"):
        load_config(["actor_rollout_ref.rollout.name=vllm"])


@pytest.mark.usefixtures("sglang_installed")
def test_arguments_of_vllm_have_no_effect_on_sglang() -> None:
    with naming(ConfigError, "engine_kwargs.vllm=", "name=vllm", "no effect"):
        load_config(["actor_rollout_ref.rollout.name=sglang", "+actor_rollout_ref.rollout.engine_kwargs.vllm.x=True"])


@pytest.mark.usefixtures("sglang_installed")
@pytest.mark.parametrize("engine", ["dynamo", "trtllm"])
def test_arguments_of_another_engine_are_noted(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    """verl, too, gives them to that engine alone."""
    key = f"actor_rollout_ref.rollout.engine_kwargs.{engine}"
    with caplog.at_level(logging.WARNING, "agentrl.config"):
        config = load_config(["actor_rollout_ref.rollout.name=sglang", f"+{key}.enable_x=True", f"{key}.empty={{}}"])
    assert config.actor_rollout_ref.rollout.engine_kwargs.sglang == {}
    (note,) = [record.getMessage() for record in caplog.records]
    assert_names(note, "1 keys", "no effect")
