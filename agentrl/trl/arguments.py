"""The table of TRL's arguments: every field of `GRPOConfig` of TRL 1.16, and fields of older releases in scripts.

A *translated* argument becomes keys of agentrl (`translation.py`). An *ignored* one changes no result of the run. A
*fixed* one is refused at any value but its default and the ones listed, since another value would change the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["translated", "ignored", "fixed"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of TRL's `GRPOConfig`."""

    name: str
    default: object
    """TRL's own default."""
    kind: Kind
    text: str
    """Translated: our keys, or the rule. Ignored: the reason. Fixed: the reason and the remedy."""
    accepted: tuple[object, ...] = ()
    """Fixed: values other than the default that are accepted, too."""


def _all(kind: Kind, text: str, **defaults: object) -> list[Argument]:
    return [Argument(name, default, kind, text) for name, default in defaults.items()]


def _fixed(name: str, default: object, text: str, *accepted: object) -> Argument:
    return Argument(name, default, "fixed", text, accepted)


MODEL, ROLLOUT, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
OPTIM = f"{ACTOR}.optim"
BATCH = "data.train_batch_size, actor.ppo_mini_batch_size and actor.ppo_epochs, by the arithmetic of batches below"
SERVERS = "it is for the server of `trl vllm-serve`; use_vllm=True starts vLLM's own servers here"
_ONE_PROCESS = "the door trains in one process; several devices are keys of agentrl (docs/scale.md)"
_DISPLAY = "it changes what is printed or where a log lies, and no number"
_HUB = "agentrl writes to no hub: upload the folder that save_model() wrote"
_SPEED = "it changes speed or memory, and no number"
_LOADER = "rows are read by agentrl's loader, in the same order"
_ATTACH = (
    "leave it out, and agentrl starts vLLM's servers, or attach to running ones by "
    f"overrides={{'{ROLLOUT}.server_urls': ['http://HOST:8000']}} (docs/engines.md)"
)
_VESPO = "it is for loss_type='vespo', which is refused"
_ADAPTIVE = (
    "TRL's adaptive entropy bonus differs from agentrl's in its first steps: give "
    "overrides={'actor_rollout_ref.actor.target_entropy': 0.2}"
)

ARGUMENTS: tuple[Argument, ...] = (
    # Length and order of the run.
    *_all("translated", "trainer.default_local_dir", output_dir=None),
    *_all("translated", "trainer.total_training_steps", num_train_epochs=3.0, max_steps=-1),
    *_all("translated", BATCH, per_device_train_batch_size=8, gradient_accumulation_steps=1),
    *_all("translated", BATCH, generation_batch_size=None, steps_per_generation=None, num_iterations=1),
    *_all("translated", "rollout.n, and the arithmetic of batches", num_generations=8),
    *_all("translated", "trainer.seed, data.seed", seed=42),
    *_all(
        "translated",
        "data.sampler.name: the order of TRL's RepeatSampler; False: data.shuffle=false",
        shuffle_dataset=True,
    ),
    # Generation.
    *_all("translated", "data.max_response_length", max_completion_length=512),
    *_all(
        "translated",
        "data.max_prompt_length with truncation=left, as TRL's first releases did; without it the model's positions "
        "less the response",
        max_prompt_length=None,
    ),
    *_all("translated", "rollout.temperature, and of validation", temperature=1.0),
    *_all("translated", "rollout.top_p, and of validation", top_p=1.0),
    *_all("translated", "rollout.top_k, and of validation; 0 and None are -1 here", top_k=0),
    *_all("translated", "model.chat_template_kwargs", chat_template_kwargs=None),
    *_all(
        "translated", "rounds of tool calls, in the loop of the door; None: no limit", max_tool_calling_iterations=None
    ),
    _fixed("min_p", None, "agentrl's engines sample by temperature, top_p and top_k: leave it out", 0, 0.0),
    _fixed(
        "repetition_penalty", 1.0, "a penalised token has another probability than the policy's: leave it at 1.0", 1
    ),
    _fixed("generation_kwargs", None, "sampling has temperature, top_p and top_k here: leave it out", {}),
    *_all("ignored", _SPEED, cache_implementation=None, use_transformers_continuous_batching=False),
    *_all("ignored", _SPEED, transformers_continuous_batching_config=None, use_transformers_paged=False),
    *_all("ignored", "sequences are packed, not padded", pad_to_multiple_of="auto"),
    *_all("ignored", "the weights of the engine are never sharded", ds3_gather_for_generation=True),
    # vLLM.
    *_all("translated", "rollout.name: vllm where true, embedded else; with the importance correction", use_vllm=False),
    *_all("translated", "rollout.gpu_memory_utilization, with use_vllm", vllm_gpu_memory_utilization=0.3),
    *_all("translated", "rollout.tensor_model_parallel_size, with use_vllm", vllm_tensor_parallel_size=1),
    *_all("translated", "rollout.max_model_len, with use_vllm", vllm_max_model_length=None),
    *_all("translated", "rollout.free_cache_engine, with use_vllm", vllm_enable_sleep_mode=False),
    *_all("translated", "algorithm.rollout_correction.*, with use_vllm", vllm_importance_sampling_correction=True),
    *_all(
        "translated",
        "rollout_correction.rollout_is and rollout_is_outside",
        vllm_importance_sampling_mode="sequence_mask",
    ),
    *_all("translated", "rollout_correction.rollout_is_threshold", vllm_importance_sampling_clip_max=3.0),
    *_all("translated", "rollout_correction.rollout_is_lower", vllm_importance_sampling_clip_min=None),
    *_all("translated", "the former name of vllm_importance_sampling_clip_max", vllm_importance_sampling_cap=None),
    _fixed("vllm_mode", "colocate", f"it names the server of `trl vllm-serve`; {_ATTACH}"),
    _fixed("vllm_server_base_url", None, f"it names the server of `trl vllm-serve`; {_ATTACH}"),
    _fixed("vllm_structured_outputs_regex", None, "constrained sampling has other probabilities: leave it out"),
    _fixed("vllm_guided_decoding_regex", None, "constrained sampling has other probabilities: leave it out"),
    *_all("ignored", _SPEED, vllm_device="auto", vllm_dtype="auto", vllm_enable_prefix_caching=None),
    *_all("ignored", SERVERS, vllm_server_host="0.0.0.0", vllm_server_port=8000, vllm_server_timeout=240.0),
    *_all("ignored", SERVERS, vllm_group_port=51216, vllm_model_impl="vllm"),
    # The loss.
    *_all("translated", "actor.policy_loss and actor.loss_agg_mode; see the losses below", loss_type="dapo"),
    *_all("translated", "actor.policy_loss.loss_mode=gspo for 'sequence'", importance_sampling_level="token"),
    *_all("translated", "actor.clip_ratio_low", epsilon=0.2),
    *_all("translated", "actor.clip_ratio_high; None: epsilon", epsilon_high=None),
    *_all("translated", "actor.clip_ratio_c, which bounds nothing where it is None", delta=None),
    *_all("translated", "actor.use_kl_loss and kl_loss_coef", beta=0.0),
    *_all("translated", "actor.kl_loss_type: k3+ where true, k3 else", use_bias_correction_kl=True),
    *_all("translated", "actor.policy_loss.options of sapo", sapo_temperature_neg=1.05, sapo_temperature_pos=1.0),
    *_all(
        "translated",
        "algorithm.masked_statuses=[length], with loss_type dapo or cispo",
        mask_truncated_completions=False,
    ),
    *_all("translated", "actor.entropy_coeff, where the loss is a mean over tokens", entropy_coef=0.0),
    *_all("translated", "algorithm.adv_options of the door's estimator", scale_rewards="group", reward_weights=None),
    *_all("translated", "algorithm.adv_estimator", multi_objective_aggregation="sum_then_normalize"),
    *_all("ignored", _VESPO, vespo_k_pos=2.0, vespo_lambda_pos=3.0, vespo_k_neg=3.0, vespo_lambda_neg=2.0),
    *_all("ignored", "it is for use_adaptive_entropy, which is refused", entropy_coef_min=0.0, entropy_coef_max=1.0),
    *_all("ignored", "it is for use_adaptive_entropy, which is refused", entropy_coef_delta=0.005, entropy_target=0.2),
    _fixed("use_adaptive_entropy", False, _ADAPTIVE),
    _fixed("top_entropy_quantile", 1.0, "no loss here leaves out tokens by their entropy: leave it at 1.0", 1),
    _fixed(
        "off_policy_mask_threshold",
        None,
        "give overrides={'algorithm.rollout_correction.reject': {...}} (docs/async.md)",
    ),
    _fixed("sync_ref_model", False, "the reference stays the first policy: leave it out"),
    *_all("ignored", "it is for sync_ref_model, which is refused", ref_model_mixup_alpha=0.6, ref_model_sync_steps=512),
    *_all("translated", f"{ACTOR}.strategy_options.moe_aux_loss_coeff", router_aux_loss_coef=None),
    # The optimizer.
    *_all("translated", f"{OPTIM}.lr", learning_rate=1e-6),
    *_all(
        "translated",
        f"{OPTIM}.lr_scheduler_type, with lr_by_mini_batch where a generation has several optimizer steps",
        lr_scheduler_type="linear",
    ),
    *_all("translated", f"{OPTIM}.min_lr_ratio, of cosine_with_min_lr", lr_scheduler_kwargs=None),
    *_all(
        "translated",
        f"{OPTIM}.lr_warmup_steps, in generations, with lr_warmup_from_zero",
        warmup_steps=0,
        warmup_ratio=None,
    ),
    *_all("translated", f"{OPTIM}.betas", adam_beta1=0.9, adam_beta2=0.999),
    *_all(
        "translated",
        f"{OPTIM}.weight_decay with decay_vectors=false, which spares norms and biases as TRL does",
        weight_decay=0.0,
    ),
    *_all("translated", "actor.grad_clip", max_grad_norm=1.0),
    _fixed(
        "optim",
        "adamw_torch_fused",
        "AdamW with states in float32 is here (8 bytes a parameter), and 8-bit states are not: give "
        "optim='adamw_torch_fused', and peft_config where memory is short; Muon is "
        f"overrides={{'{OPTIM}.name': 'muon'}}",
        *("adamw_torch", "adamw_hf", "adamw_torch_xla", "adamw_torch_npu_fused", "adamw_apex_fused"),
        "paged_adamw_32bit",
    ),
    _fixed("adam_epsilon", 1e-8, "agentrl's AdamW has 1e-8: leave it out"),
    _fixed("optim_args", None, "AdamW's arguments are adam_beta1, adam_beta2 and weight_decay here: leave it out"),
    _fixed("optim_target_modules", None, "all parameters, or all adapters, are trained: leave it out"),
    _fixed("neftune_noise_alpha", None, "embeddings get no noise: leave it out"),
    _fixed("label_smoothing_factor", 0.0, "GRPO has no labels: leave it out", 0),
    # The model.
    *_all(
        "translated",
        "model.dtype, of dtype (auto: the folder's); other entries that change numbers are refused",
        model_init_kwargs=None,
    ),
    *_all("translated", "model.trust_remote_code", trust_remote_code=False),
    *_all("translated", "model.enable_gradient_checkpointing", gradient_checkpointing=True),
    *_all("translated", "actor.use_torch_compile", torch_compile=False),
    *_all(
        "translated",
        "parameters are float32 as in TRL, and products are computed in float32, too, where TRL's autocast rounds them "
        "to bfloat16. For bfloat16 parameters: model_init_kwargs={'dtype': 'bfloat16'}",
        bf16=None,
    ),
    _fixed("fp16", False, "give bf16=True, or model_init_kwargs={'dtype': 'bfloat16'}"),
    _fixed("cast_lm_head_to_fp32", False, "parameters have one dtype: leave it out, float32 is the default", True),
    *_all("ignored", "agentrl's models are trained without dropout", disable_dropout=False),
    *_all("ignored", _SPEED, tf32=None, bf16_full_eval=False, fp16_full_eval=False, use_cache=False),
    *_all("ignored", _SPEED, gradient_checkpointing_kwargs=None, activation_checkpointing=None),
    *_all("ignored", _SPEED, activation_checkpointing_kwargs=None, torch_compile_backend=None, torch_compile_mode=None),
    *_all("ignored", _SPEED, use_liger_kernel=False, use_liger_loss=False, liger_kernel_config=None),
    *_all("ignored", _SPEED, torch_empty_cache_steps=None),
    # Logs, validation, checkpoints.
    *_all("translated", "trainer.logger", report_to="none"),
    *_all("translated", "trainer.experiment_name", run_name=None),
    *_all("translated", "trainer.project_name", project="huggingface"),
    *_all("translated", "entries of trainer.state.log_history", logging_strategy="steps", logging_steps=10),
    *_all("translated", "entries of trainer.state.log_history", logging_first_step=False),
    *_all("translated", "trainer.show_trajectory_freq", log_completions=False),
    *_all("translated", "trainer.test_freq", eval_strategy="no", eval_steps=None),
    *_all("translated", "trainer.val_before_train", eval_on_start=False),
    *_all("translated", "rollout.val_kwargs.n; None: num_generations", num_generations_eval=None),
    *_all("translated", "trainer.save_freq", save_strategy="steps", save_steps=500),
    *_all("translated", "trainer.max_actor_ckpt_to_keep", save_total_limit=None),
    *_all("translated", "as the argument of train()", resume_from_checkpoint=None),
    *_all("translated", "trainer.device", use_cpu=False),
    _fixed("eval_delay", 0, "validation is due every eval_steps: leave it out"),
    _fixed(
        "load_best_model_at_end",
        False,
        "give overrides={'trainer.metric_for_best_model': 'val/reward_sampled', "
        "'trainer.load_best_model_at_end': True}",
    ),
    _fixed("metric_for_best_model", None, "give overrides={'trainer.metric_for_best_model': 'val/reward_sampled'}"),
    *_all("ignored", "it is for metric_for_best_model", greater_is_better=None),
    _fixed("save_only_model", False, "a checkpoint holds the optimizer, too: leave it out"),
    _fixed("ignore_data_skip", False, "a resumed run continues with the next rows: leave it out"),
    _fixed("push_to_hub", False, _HUB),
    _fixed("log_completions_hub_repo", None, _HUB),
    *_all("ignored", _HUB, hub_token=None, hub_private_repo=None, hub_model_id=None, hub_strategy="every_save"),
    *_all("ignored", _HUB, hub_always_push=False, hub_revision=None),
    *_all("ignored", _DISPLAY, log_multimodal=True, num_completions_to_print=None, log_unique_prompts=False),
    *_all("ignored", _DISPLAY, log_on_each_node=True, logging_nan_inf_filter=True, log_level="passive"),
    *_all("ignored", _DISPLAY, log_level_replica="warning", disable_tqdm=None, include_num_input_tokens_seen="no"),
    *_all("ignored", _DISPLAY, trackio_space_id=None, trackio_bucket_id=None, trackio_static_space_id=None),
    *_all(
        "ignored",
        _DISPLAY,
        logging_dir=None,
        overwrite_output_dir=False,
        debug="",
        skip_memory_metrics=True,
        wandb_log_unique_prompts=False,
    ),
    *_all("ignored", "validation reads every row, whatever its batches", per_device_eval_batch_size=8),
    *_all("ignored", "validation reads every row, whatever its batches", eval_accumulation_steps=None),
    *_all("ignored", "validation has no predictions but trajectories", prediction_loss_only=False),
    *_all("ignored", "validation has no predictions but trajectories", eval_do_concat_batches=True),
    *_all("ignored", "validation has no predictions but trajectories", eval_use_gather_object=False),
    *_all(
        "ignored", "validation has no predictions but trajectories", include_for_metrics=[], batch_eval_metrics=False
    ),
    *_all("ignored", "train() trains and evaluate() validates", do_train=False, do_eval=False, do_predict=False),
    *_all("ignored", "a checkpoint is resumed whole", restore_callback_states_from_checkpoint=False),
    *_all("ignored", "SIGTERM saves a checkpoint (trainer.preemption_seconds)", enable_jit_checkpoint=False),
    *_all("translated", "where true, reward functions are given no column but the prompt", remove_unused_columns=False),
    *_all("ignored", "TRL's sampler of GRPO reads seed alone", data_seed=None, train_sampling_strategy="random"),
    *_all("ignored", "TRL's sampler of GRPO reads seed alone", length_column_name="length", group_by_length=False),
    *_all("ignored", "GRPO's last batch is dropped where it is not whole, in both", dataloader_drop_last=False),
    *_all(
        "ignored", _LOADER, dataloader_num_workers=0, dataloader_pin_memory=True, dataloader_persistent_workers=False
    ),
    *_all("ignored", _LOADER, dataloader_prefetch_factor=None, dataloader_multiprocessing_context=None),
    *_all("ignored", _LOADER, dataloader_in_order=True, label_names=None),
    *_all("ignored", "a run repeats exactly here, with the limits of docs/architecture.md", full_determinism=False),
    # Devices.
    _fixed("auto_find_batch_size", False, "micro-batches go by tokens (ppo_max_token_len_per_gpu): leave it out"),
    _fixed("deepspeed", None, _ONE_PROCESS),
    _fixed("fsdp", None, _ONE_PROCESS, "", []),
    _fixed("parallelism_config", None, _ONE_PROCESS),
    _fixed("accelerator_config", None, _ONE_PROCESS),
    *_all("ignored", _ONE_PROCESS, fsdp_config=None, local_rank=-1, ddp_find_unused_parameters=None),
    *_all("ignored", _ONE_PROCESS, ddp_bucket_cap_mb=None, ddp_broadcast_buffers=None, ddp_static_graph=None),
    *_all("ignored", _ONE_PROCESS, ddp_backend=None, ddp_timeout=1800, average_tokens_across_devices=True),
    *_all("ignored", _ONE_PROCESS, save_on_each_node=False),
)
BY_NAME = {argument.name: argument for argument in ARGUMENTS}
DEFAULTS = {argument.name: argument.default for argument in ARGUMENTS}
