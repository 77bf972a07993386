"""Names of TRL's `GRPOTrainer` (1.16, with transformers' `Trainer`), and the replacements here for missing ones.

A subclass that overrides one of them would never be called, and a value that is set on one would never be read.
"""

from __future__ import annotations

from agentrl.trl.arguments import BY_NAME

_GROUPS = (
    (
        "a loss of yours is a function: overrides={'actor_rollout_ref.actor.policy_loss.loss_mode': "
        "'FILE.py:FUNCTION'} (docs/extending.md)",
        "_compute_loss _get_per_token_logps_and_entropies _loss_shifts_labels autocast_smart_context_manager "
        "aux_loss_enabled compute_loss compute_loss_context_manager compute_loss_func get_gamma_weights "
        "get_high_entropy_mask get_off_policy_mask label_smoother loss_is_scaled_for_ga prediction_step "
        "training_step",
    ),
    (
        "rewards are given by reward_funcs, whose functions log by log_metric",
        "_calculate_rewards reward_func_names reward_processing_classes",
    ),
    (
        "an agent loop samples here (docs/extending.md), and advantages are a function: "
        "overrides={'algorithm.adv_estimator': 'FILE.py:FUNCTION'}",
        "_generate _generate_and_score_completions _generate_single_turn _get_tool_suffix_ids _tokenize_prompts "
        "_tool_call_loop chat_template eos_token_ids generation_config generation_kwargs rollout_func "
        "vllm_generation",
    ),
    (
        "numbers are logged by log_metric in reward functions, and read in a callback's on_log or in state.log_history",
        "_log_completion_extra _log_metric _logs _metrics _pending_extra_logs _pending_metrics log",
    ),
    (
        "the optimizer and its schedule are arguments of GRPOConfig, and keys of agentrl "
        "(actor_rollout_ref.actor.optim.*)",
        "_clip_grad_norm _get_grad_norm _get_learning_rate commit_scheduler create_optimizer "
        "create_optimizer_and_scheduler create_scheduler get_decay_parameter_names get_learning_rates "
        "get_optimizer_cls_and_kwargs get_optimizer_group lr_scheduler optimizer optimizer_cls_and_kwargs",
    ),
    (
        "rows are read by agentrl's loader; their order is overrides={'data.sampler.name': 'FILE.py:CLASS'} "
        "(docs/extending.md)",
        "_get_collator_with_removed_columns _get_dataloader _get_eval_sampler _get_num_items_in_batch "
        "_get_train_sampler _prepare_input _prepare_inputs _remove_unused_columns "
        "_set_signature_columns_if_needed data_collator get_batch_samples get_eval_dataloader get_test_dataloader "
        "get_train_dataloader num_examples",
    ),
    (
        "the weights are in the run's own workers: after train() load OUTPUT_DIR/policy, or the folder of save_model()",
        "_move_model_to_device _prepare_for_training _wrap_model call_model_init floating_point_ops "
        "get_num_trainable_parameters model model_accepts_loss_kwargs model_init model_wrapped "
        "neftune_hook_handle ref_model",
    ),
    (
        "agentrl writes the checkpoints: a callback's on_save is called after each, and save_model(FOLDER) copies "
        "the policy",
        "_determine_best_metric _load_best_model _load_callback_state _load_from_checkpoint "
        "_load_optimizer_and_scheduler _load_rng_state _load_scaler _save _save_checkpoint "
        "_save_optimizer_and_scheduler _save_rng_state _save_scaler save_model store_flos",
    ),
    (
        "eval_dataset is scored by reward_funcs, and a callback's on_evaluate is given the numbers",
        "_evaluate _maybe_log_save_evaluate compute_metrics evaluate evaluation_loop gather_function predict "
        "preprocess_logits_for_metrics",
    ),
    (
        "agentrl writes to no hub: after save_model(FOLDER) call "
        "huggingface_hub.upload_folder(folder_path=FOLDER, repo_id=...)",
        "_finish_current_push _name _paper _push_from_checkpoint _tag_names _template_file create_model_card "
        "hub_model_id init_hf_repo push_in_progress push_to_hub",
    ),
    (
        "the door trains in one process, and devices are keys of agentrl (docs/scale.md)",
        "_build_accelerator_args _dist _has_mixed_mesh_grads _mixed_mesh_grad_norm _mixed_mesh_grads "
        "_prepare_context_parallel_inputs _sync_replicated_trainable_parameters accelerator "
        "create_accelerator_and_postprocess deepspeed get_cp_size get_sp_size get_total_train_batch_size "
        "get_tp_size is_deepspeed_enabled is_distributed_loading_by_transformers is_fsdp_enabled "
        "is_fsdp_xla_enabled is_fsdp_xla_v1_enabled is_fsdp_xla_v2_enabled is_model_parallel "
        "place_model_on_device",
    ),
    (
        "no search over hyperparameters is here: run the script with several GRPOConfigs",
        "_hp_search_setup _report_to_hp_search _trial _tune_save_checkpoint compute_objective hp_name "
        "hp_search_backend hp_space hyperparameter_search objective",
    ),
    (
        "it is a part of TRL's training loop, and agentrl runs its own: a callback sees its steps (docs/trl.md)",
        "_async_tool_dicts _attn_mask_causal_checked _batch_environments _buffered_inputs _created_lr_scheduler "
        "_current_train_step_time _entropy_bonus_enabled _entropy_window_stats _env_tools _environment_pool "
        "_eval_dataloaders _finalize_training _get_output_dir _globalstep_last_logged _has_async_funcs "
        "_image_pad_token_id _init_training_state _initial_global_step _initial_num_input_tokens_seen "
        "_inner_training_loop _is_vlm _issue_warnings_after_load _last_loaded_step _last_world_entropy "
        "_loggers_initialized _memory_tracker _multi_environment _run_epoch _send_telemetry _signature_columns "
        "_standalone_tools _step _tokenizer _total_loss_scalar _total_train_tokens _tr_loss "
        "_track_num_input_tokens _train_batch_size _update_auto_batch_size _validate_args _video_pad_token_id "
        "callback_handler can_return_loss continuous_batching_config control current_flos "
        "current_gradient_accumulation_steps end environment_factories environments is_in_train "
        "model_preparation_time set_initial_training_values",
    ),
)
"""Pairs of advice and the names that it is for."""
ARGUMENTS = {"epsilon_low": "epsilon", **{name: name for name in BY_NAME}}
"""Attributes whose values are arguments of `GRPOConfig`, by the argument."""
HERE = (
    *("add_callback", "args", "eval_dataset", "is_local_process_zero", "is_world_process_zero", "log_metrics"),
    *("metrics_format", "pop_callback", "processing_class", "remove_callback", "reward_funcs", "save_metrics"),
    *("save_state", "state", "tokenizer", "tools", "train", "train_dataset"),
)
"""Names that this trainer has, too."""
INSTEAD = {name: text for text, names in _GROUPS for name in names.split()}
"""Advice for each other name."""


def advice(name: str) -> str | None:
    """Say what stands for a name of TRL's trainer; None for a name that it has not."""
    if name in ("train_dataloader", "eval_dataloader"):
        name = f"get_{name}"
    if name in INSTEAD:
        return INSTEAD[name]
    if name in HERE:
        return "nothing here calls or reads another one: give it to the trainer, or do around the call what it shall do"
    if name in ARGUMENTS:
        return f"it is an argument: GRPOConfig({ARGUMENTS[name]}=...), or trainer.args.{ARGUMENTS[name]} before train()"
    return None
