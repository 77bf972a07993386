"""Keys of verl's launch scripts that agentrl does not have, so that such scripts run as they are.

Where a value asks for what agentrl always does, or only for how a device is used (never for another result), the key
is accepted with a note. Any other value is an error that says what to use instead.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class VerlKey:
    """One key, or all that match a pattern."""

    pattern: str
    note: str
    """Behaviour of agentrl: the note for an accepted value, and the reason in the error for another."""
    accepted: tuple[Any, ...] | None = None
    """Values that are accepted; None: every value."""


OFF = (False, None)
MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MICRO_BATCHES = "micro-batches go by tokens (ppo_max_token_len_per_gpu, log_prob_max_token_len_per_gpu)"
SERVER_ARGUMENT = (
    "the engine decides that itself; SGLang's own arguments: actor_rollout_ref.rollout.engine_kwargs.sglang"
)
OTHER_ENGINE = (
    "the engines are embedded and sglang, whose arguments go under actor_rollout_ref.rollout.engine_kwargs.sglang"
)
BUCKETS = "weights are sent by actor_rollout_ref.rollout.update_weights_transport and update_weights_bucket_megabytes"
SAME_CHECKPOINT = "one checkpoint holds policy, critic, optimizers and data position"
PROFILES = "in trainer.profile_steps torch.profiler runs on every rank, for every role"

VERL_KEYS = (
    VerlKey("data.return_raw_chat", "rows always reach the loops as messages", (True,)),
    VerlKey("data.truncation", "prompts are never cut: data.filter_overlong_prompts drops or refuses", ("error",)),
    VerlKey("data.reward_fn_key", "scorers are chosen by the column data_source", ("data_source",)),
    VerlKey("data.return_raw_input_ids", "use the trajectories of the run", OFF),
    VerlKey("data.return_full_prompt", "use the trajectories of the run", OFF),
    VerlKey("data.return_multi_modal_inputs", "images always travel with their sequences"),
    VerlKey("data.video_key", "no video is read", ("videos", None)),
    VerlKey("data.*_workers", "rows are read as they are needed, in this process"),
    VerlKey("data.trust_remote_code", f"use {MODEL}.trust_remote_code", OFF),
    VerlKey("data.tool_config_path", f"use {ROLLOUT}.multi_turn.tool_config_path", (None,)),
    VerlKey("data.apply_chat_template_kwargs", f"use {MODEL}.chat_template_kwargs", ({}, None)),
    VerlKey("data.sampler.class_*", "use data.sampler.name=path/to/file.py:Class", (None,)),
    VerlKey("*.use_shm", "models and data are read from their own place", OFF),
    VerlKey("actor_rollout_ref.hybrid_engine", "policy and engine always work in turn", (True,)),
    VerlKey("actor_rollout_ref.nccl_timeout", "a call of the workers may take two hours"),
    VerlKey("*.use_remove_padding", "sequences are always packed without padding", (True,)),
    VerlKey(f"{MODEL}.custom_chat_template", f"use {MODEL}.chat_template, the path of a Jinja file", (None,)),
    VerlKey(f"{MODEL}.override_config", "the model's own config.json holds", ({}, None)),
    VerlKey("*.model.external_lib", "use trust_remote_code", (None,)),
    VerlKey(f"{MODEL}.exclude_modules", f"name the layers in {MODEL}.target_modules", (None,)),
    VerlKey("critic.model.lora_rank", "the critic trains all of its parameters", (0, None)),
    VerlKey("*.use_liger", "the log-probs are computed in chunks already", OFF),
    VerlKey("*.use_fused_kernels", "the log-probs are computed in chunks already", OFF),
    VerlKey("critic.model.enable_gradient_checkpointing", f"follows {MODEL}.enable_gradient_checkpointing"),
    VerlKey("critic.model.path", "use critic.path", ()),
    VerlKey("critic.model.tokenizer_path", "the critic sees the policy's tokens"),
    VerlKey("critic.enable", "a critic is made where algorithm.adv_estimator needs one", (None,)),
    VerlKey("*.fsdp_config.model_dtype", "use dtype of the model", ("fp32", "float32")),
    VerlKey("actor_rollout_ref.ref.fsdp_config.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    VerlKey("critic.*.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    VerlKey("*.fsdp_config.optimizer_offload", "follows param_offload"),
    VerlKey("*.fsdp_config.offload_policy", "use param_offload", OFF),
    VerlKey("model.fsdp_config.cpu_offload", "use param_offload beside it", OFF),
    VerlKey("model.fsdp_config.offload_params", "use param_offload beside it", OFF),
    VerlKey("model.partial_pretrain", "use model.path", ()),
    VerlKey("*.fsdp_config.wrap_policy.*", "each decoder layer is sharded for itself"),
    VerlKey("*.fsdp_config.reshard_after_forward", "a layer's whole parameters are let go of after its forward pass"),
    VerlKey("*.fsdp_config.forward_prefetch", "FSDP2 decides that itself"),
    VerlKey("*.fsdp_config.use_orig_params", "FSDP2 always does"),
    VerlKey("*.fsdp_config.mixed_precision.*", "use dtype of the model", ()),
    VerlKey("*.fsdp_config.ulysses_sequence_parallel_size", "use the key beside fsdp_config", (1,)),
    VerlKey("reward_model.ulysses_sequence_parallel_size", "it is a key of actor, ref and critic", (1,)),
    VerlKey(f"{ROLLOUT}.data_parallel_size", f"use {ROLLOUT}.num_servers", (1,)),
    VerlKey(f"{ROLLOUT}.expert_parallel_size", f"use {ROLLOUT}.engine_kwargs.sglang.ep_size", (1,)),
    VerlKey(f"{ROLLOUT}.pipeline*_parallel_size", f"a server is split by {ROLLOUT}.tensor_model_parallel_size", (1,)),
    VerlKey("*micro_batch_size*", MICRO_BATCHES),
    VerlKey("*use_dynamic_bsz", MICRO_BATCHES),
    VerlKey("*.fsdp_config.use_torch_compile", f"{ACTOR}.use_torch_compile is for every role"),
    VerlKey("actor_rollout_ref.ref.use_torch_compile", f"follows {ACTOR}.use_torch_compile"),
    VerlKey("critic.use_torch_compile", f"follows {ACTOR}.use_torch_compile"),
    VerlKey(f"{ACTOR}.checkpoint.*contents", SAME_CHECKPOINT),
    VerlKey("trainer.checkpoint.*contents", SAME_CHECKPOINT),
    VerlKey("critic.checkpoint.*", f"{SAME_CHECKPOINT}; {ACTOR}.checkpoint.async_save is for all of it"),
    VerlKey("*.entropy_from_logits_with_chunking", "the entropy is computed in chunks"),
    VerlKey("*.entropy_checkpointing", "the entropy is computed in chunks"),
    VerlKey(f"{ACTOR}.calculate_entropy", "the entropy is always measured"),
    VerlKey(f"{ACTOR}.data_loader_seed", "use trainer.seed", (None,)),
    VerlKey(f"{ACTOR}.loss_scale_factor", "the loss is scaled by loss_agg_mode alone", (None,)),
    VerlKey(f"{ACTOR}.tis_imp_ratio_cap", "this version trains on policy: no importance cap", (-1, None)),
    VerlKey("actor_rollout_ref.ref.strategy", "the reference is sharded with FSDP2", ("fsdp2", "fsdp")),
    VerlKey("critic.strategy", "the critic is sharded with FSDP2", ("fsdp2", "fsdp")),
    VerlKey("reward_model.strategy", "the reward model is sharded with FSDP2", ("fsdp2", "fsdp")),
    VerlKey("model.strategy", "the model is sharded with FSDP2", ("fsdp2", "fsdp")),
    VerlKey("*.optim.total_training_steps", "the schedule runs over the steps of the trainer", (-1, None)),
    VerlKey("*.optim.lr_warmup_steps_ratio", "use lr_warmup_steps beside it", (0, None)),
    VerlKey("*.optim.warmup_style", "use lr_scheduler_type beside it", ("constant", None)),
    VerlKey("*.optim.clip_grad", "use grad_clip of the actor or critic", ()),
    VerlKey(f"{ROLLOUT}.mode", "trajectories always run asynchronously", ("async",)),
    VerlKey(f"{ROLLOUT}.do_sample", f"training always samples; to validate greedily: {ROLLOUT}.val_kwargs", (True,)),
    VerlKey(f"{ROLLOUT}.calculate_log_probs", "the engine always returns the log-probs of what it sampled"),
    VerlKey(f"{ROLLOUT}.ignore_eos", "a turn ends at the model's end-of-turn token", OFF),
    VerlKey(f"{ROLLOUT}.prompt_length", "use data.max_prompt_length", ()),
    VerlKey(f"{ROLLOUT}.response_length", "use data.max_response_length", ()),
    VerlKey(f"{ROLLOUT}.dtype", f"use {MODEL}.dtype", ()),
    VerlKey(f"{ROLLOUT}.max_num_batched_tokens", SERVER_ARGUMENT),
    VerlKey(f"{ROLLOUT}.enable_chunked_prefill", SERVER_ARGUMENT),
    VerlKey(f"{ROLLOUT}.cudagraph_capture_sizes", SERVER_ARGUMENT),
    VerlKey(f"{ROLLOUT}.enforce_eager", SERVER_ARGUMENT),
    VerlKey(f"{ROLLOUT}.scheduling_policy", SERVER_ARGUMENT),
    VerlKey(
        f"{ROLLOUT}.enable_prefix_caching", "what a prompt has in common with earlier ones is always computed once"
    ),
    VerlKey(f"{ROLLOUT}.logprobs_mode", "log-probs are those of logits / temperature", ("processed_logprobs", None)),
    VerlKey(f"{ROLLOUT}.over_sample_rate", "all trajectories of a step are waited for", (0, None)),
    VerlKey(f"{ROLLOUT}.skip_tokenizer_init", "engines take and return token ids"),
    VerlKey(
        f"{ROLLOUT}.multi_stage_wake_up", f"with {ROLLOUT}.free_cache_engine weights come back before the KV cache"
    ),
    VerlKey(f"{ROLLOUT}.load_format", "the engine is always given the policy's own weights"),
    VerlKey(f"{ROLLOUT}.layered_summon", BUCKETS),
    VerlKey(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", BUCKETS, (None,)),
    VerlKey(f"{ROLLOUT}.checkpoint_engine.*", BUCKETS),
    VerlKey(f"{ROLLOUT}.disable_log_stats", "the engine's numbers are metrics of each step"),
    VerlKey(f"{ROLLOUT}.engine_kwargs.vllm*", OTHER_ENGINE),
    VerlKey(f"{ROLLOUT}.engine_kwargs.trtllm*", OTHER_ENGINE),
    VerlKey(f"{ROLLOUT}.agent.num_workers", "one event loop runs all trajectories"),
    VerlKey(f"{ROLLOUT}.agent.custom_async_server.*", "engines of your own are not part of this version", (None,)),
    VerlKey(f"{ROLLOUT}.multi_turn.enable", "agent_name of each row chooses its loop", (True,)),
    VerlKey(f"{ROLLOUT}.multi_turn.max_turns", "use max_assistant_turns and max_user_turns", (None,)),
    VerlKey(f"{ROLLOUT}.multi_turn.completion_callback", "write an agent loop", (None,)),
    VerlKey(f"{ROLLOUT}.multi_turn.use_inference_chat_template", "sampled tokens are trained on as they are"),
    VerlKey(f"{ROLLOUT}.multi_turn.tokenization_sanity_check_mode", "sampled tokens are trained on as they are"),
    VerlKey("reward_model.model.input_tokenizer", "the reward model reads messages by its own tokenizer"),
    VerlKey("reward_model.launch_reward_fn_async", "scoring always runs beside generation"),
    VerlKey("reward_model.use_reward_loop", "scoring always runs beside generation"),
    VerlKey("algorithm.use_pf_ppo", "prompts are not re-weighted", OFF),
    VerlKey("trainer.balance_batch", "micro-batches are balanced by tokens"),
    VerlKey("trainer.default_hdfs_dir", "use trainer.default_remote_dir (hdfs://, s3://, ...)", (None,)),
    VerlKey("trainer.max_critic_ckpt_to_keep", f"{SAME_CHECKPOINT}: trainer.max_actor_ckpt_to_keep"),
    VerlKey("trainer.max_ckpt_to_keep", "use trainer.max_actor_ckpt_to_keep", ()),
    VerlKey("trainer.remove_previous_ckpt_in_save", "use trainer.max_actor_ckpt_to_keep", OFF),
    VerlKey("trainer.del_local_ckpt_after_load", "checkpoints stay until newer ones push them out", OFF),
    VerlKey("trainer.log_val_generations", "trajectories are saved by trainer.save_trajectories"),
    VerlKey("trainer.rollout_data_dir", "trajectories are saved by trainer.save_trajectories", (None,)),
    VerlKey("trainer.validation_data_dir", "trajectories are saved by trainer.save_trajectories", (None,)),
    VerlKey("trainer.profile_continuous_steps", PROFILES),
    VerlKey("trainer.*_nsight_options", PROFILES, ({}, None)),
    VerlKey("trainer.*_nsight_options.*", PROFILES),
    VerlKey("global_profiler.steps", "use trainer.profile_steps", ([], None)),
    VerlKey("global_profiler.tool", PROFILES, ("torch", "torch_memory", None)),
    VerlKey("global_profiler.*", PROFILES),
    VerlKey("*.profiler.*", PROFILES),
    VerlKey("trainer.ray_wait_register_center_timeout", "workers need no register centre"),
    VerlKey("trainer.use_legacy_worker_impl", "there is one kind of worker"),
    VerlKey("ray_kwargs.*", "use ray_init.address, ray_init.num_cpus and ray_init.timeline_json_file"),
)


def translate(unknown: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Sort keys that the schema does not have.

    Returns (keys that are no verl keys either, notes for accepted values, messages for values that ask for something
    agentrl does not do).
    """
    strangers, notes, refused = [], [], []
    for key, value in unknown.items():
        rule = next((rule for rule in VERL_KEYS if fnmatch.fnmatchcase(key, rule.pattern)), None)
        if rule is None:
            strangers.append(key)
        elif rule.accepted is None or any(value == one for one in rule.accepted):
            notes.append(f"{key}={value} has no effect of its own: {rule.note}")
        else:
            only = f" (accepted here: {', '.join(map(str, rule.accepted))})" if rule.accepted else ""
            refused.append(f"{key}={value} asks for something that agentrl does not do: {rule.note}{only}")
    return strangers, notes, refused
