"""The table of verl's keys: of 0.9.1 and 0.7.1, its recipes, its asynchronous trainers and Search-R1's fork.

Keys are matched by the first entry whose pattern fits. A key without an entry that is a key of ours is the same here.
"""

from __future__ import annotations

from agentrl.verl.keys import rewrites
from agentrl.verl.keys.entries import VerlKey, alias, arranged, noted, only, refused, translated
from agentrl.verl.keys.rewrites import (
    ACTOR,
    ASYNCHRONOUS,
    CORRECTION,
    MODEL,
    REF,
    ROLLOUT,
    TURNS,
)

OFF = (False, None)
MICRO_BATCHES = "micro-batches go by tokens (ppo_max_token_len_per_gpu, log_prob_max_token_len_per_gpu)"
FIRST_NAMES = (
    f"{ACTOR}.ppo_micro_batch_size",
    "critic.ppo_micro_batch_size",
    f"{REF}.log_prob_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size",
)
"""Names of micro-batches in verl's first releases, later ..._per_gpu."""
SERVER_ARGUMENT = f"the engine decides that itself; SGLang's own arguments: {ROLLOUT}.engine_kwargs.sglang"
OTHER_ENGINE = f"the engine is SGLang, whose arguments go under {ROLLOUT}.engine_kwargs.sglang"
BUCKETS = f"weights are sent by {ROLLOUT}.update_weights_transport and update_weights_bucket_megabytes"
SAME_CHECKPOINT = "one checkpoint holds policy, critic, optimizers and data position"
PROFILES = "in trainer.profile_steps torch.profiler runs on every rank, for every role"
FSDP2 = "models are sharded by FSDP2"
WEIGHTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")
"""Weights of the losses of routers in Megatron's config."""
QUANTISED = "quantised training and rollouts are not part of agentrl"
TURBO = "FSDP2 shards all parameters over all ranks"
OWN_TRAINER = "a recipe's trainer of its own, which is not part of agentrl"
TEACHER = "teachers are under distillation"
LOSS, TEACHERS = "distillation.distillation_loss", "distillation.teacher_models"
REWARD_MODEL = tuple(
    f"reward_model.{name}"
    for name in (
        "enable",
        "model.path",
        "model.trust_remote_code",
        "model.replaces_scorers",
        "model.generative",
        "enable_resource_pool",
        "nnodes",
        "n_gpus_per_node",
        "rollout.tensor_model_parallel_size",
        "rollout.gpu_memory_utilization",
        "rollout.engine_kwargs.sglang",
        "timeout",
        "max_concurrent",
    )
)
DATA = (
    translated(
        "data.truncation",
        "read with data.filter_overlong_prompts=false alone; the agent loops of verl 0.9.1 do not read it, and cut on "
        "the left",
        ("data.truncation",),
        lambda value, _: {} if value is None else {"data.truncation": value},
    ),
    translated(
        "data.gen_batch_size",
        "with algorithm.filter_groups.enable, as here; else it must be data.train_batch_size, in whose place DAPO's "
        "recipe takes it",
        ("data.gen_batch_size", "data.train_batch_size"),
        rewrites.generation_batch,
    ),
    alias("data.train_max_samples", "data.train_max_samples", "-1 means all, which is null here", off=(-1, None)),
    alias("data.val_max_samples", "data.val_max_samples", "-1 means all, which is null here", off=(-1, None)),
    alias("data.train_data_num", "data.train_max_samples"),
    alias("data.val_data_num", "data.val_max_samples"),
    alias("data.shuffle_train_dataloader", "data.shuffle"),
    alias("data.seed", "data.seed", "null is 1 here"),
    noted("data.validation_shuffle", "validation is the same in every order"),
    noted("data.return_raw_chat", "rows always reach the loops as messages"),
    only("data.reward_fn_key", "scorers are chosen by the column data_source", "data_source", None),
    only("data.return_raw_input_ids", "use the trajectories of the run", *OFF),
    only("data.return_full_prompt", "use the trajectories of the run", *OFF),
    noted("data.return_multi_modal_inputs", "images always travel with their sequences"),
    only("data.video_key", "no video is read", "videos", None),
    only("data.audio_key", "no audio is read", "audios", None),
    noted("data.image_patch_size", "the model's own processor decides"),
    only("data.mm_processor_kwargs*", "the model's own processor decides", {}, None),
    noted("data.*_workers", "rows are read as they are needed, in this process"),
    alias("data.trust_remote_code", f"{MODEL}.trust_remote_code", off=OFF),
    only("data.tokenizer", "the tokenizer is the model's", None),
    alias("data.tool_config_path", f"{TURNS}.tool_config_path"),
    only("data.function_tool_path", "tools are named in a YAML file", None),
    VerlKey(
        "data.apply_chat_template_kwargs.*",
        f"it is {MODEL}.chat_template_kwargs here",
        ours=(f"{MODEL}.chat_template_kwargs",),
        into=f"{MODEL}.chat_template_kwargs",
    ),
    only("data.apply_chat_template_kwargs", f"use {MODEL}.chat_template_kwargs", {}, None),
    translated(
        "data.custom_cls.path",
        "the same; a pkg:// before a module's name is left out",
        ("data.custom_cls.path",),
        lambda value, _: {} if value is None else {"data.custom_cls.path": str(value).removeprefix("pkg://")},
    ),
    translated(
        "data.custom_cls.name",
        "read with data.custom_cls.path alone",
        ("data.custom_cls.name",),
        lambda value, values: {"data.custom_cls.name": value} if value and values.get("data.custom_cls.path") else {},
    ),
    translated(
        "data.sampler.class_path",
        "the class of data.sampler.class_name, as data.sampler.name",
        ("data.sampler.name",),
        rewrites.sampler,
    ),
    noted("data.sampler.class_name", "read with class_path alone"),
    only("data.datagen.*", "data is not generated while training", None),
    translated(
        "data.max_start_length",
        "the first prompt's length (Search-R1), which is data.max_prompt_length here",
        ("data.max_prompt_length",),
        lambda value, _: {"data.max_prompt_length": value},
    ),
    *(
        refused(f"data.{name}", OWN_TRAINER)
        for name in ("filter_accuracy", "accuracy_*", "oversample_factor", "filter_truncate")
    ),
)

MODELS = (
    noted("*.use_shm", "models and data are read from their own place"),
    only("*.model.hf_config_path", "the configuration is the model's own", None),
    only(f"{MODEL}.tokenizer_path", "the tokenizer is the model's own", None),
    noted("critic.model.tokenizer_path", "the critic sees the policy's tokens"),
    only("*.model.external_lib", "use trust_remote_code", None),
    alias(f"{MODEL}.custom_chat_template", f"{MODEL}.chat_template"),
    translated(
        f"{MODEL}.override_config",
        "the same, without model_config around it; attention is computed in one way, and there is no dropout",
        (f"{MODEL}.override_config",),
        rewrites.override_config,
    ),
    noted("*.override_config.attn_implementation", "attention is computed in one way, without padding"),
    only("*.override_config.*dropout", "models are trained without dropout", 0.0, None),
    only("*.override_config.*pdrop", "models are trained without dropout", 0.0, None),
    only("*.override_config.moe_config.freeze_moe_router", "all parameters of the policy learn", *OFF),
    only("*.override_config.model_config", "the model's own config.json holds", {}, None),
    only("*.override_config", "the model's own config.json holds", {}, None),
    refused("*.override_config.*", "the model's own config.json holds: edit a copy of it"),
    noted("*.use_remove_padding", "sequences are always packed without padding"),
    translated(
        f"{MODEL}.lora_alpha",
        "read with lora_rank above 0 alone",
        (f"{MODEL}.lora_alpha",),
        lambda value, values: {f"{MODEL}.lora_alpha": value} if values.get(f"{MODEL}.lora_rank") else {},
    ),
    alias(f"{MODEL}.lora.rank", f"{MODEL}.lora_rank", off=(0, None)),
    translated(
        f"{MODEL}.lora.alpha",
        f"it is {MODEL}.lora_alpha here",
        (f"{MODEL}.lora_alpha",),
        lambda value, values: {f"{MODEL}.lora_alpha": value} if values.get(f"{MODEL}.lora.rank") else {},
    ),
    translated(
        f"{MODEL}.lora.target_modules",
        f"Megatron's names of the layers become those of {MODEL}.target_modules",
        (f"{MODEL}.target_modules",),
        rewrites.adapter_layers,
    ),
    alias(f"{MODEL}.lora.adapter_path", f"{MODEL}.lora_adapter_path"),
    only(f"{MODEL}.lora.dropout", "adapters are trained without dropout", 0, None),
    alias(f"{MODEL}.lora.exclude_modules", f"{MODEL}.exclude_modules", off=([], None)),
    only(f"{MODEL}.lora.type", "adapters are LoRA's", "lora", None),
    noted(f"{MODEL}.lora.*", "adapters are peft's, merged for the engine"),
    only("critic.model.lora*rank", "the critic trains all of its parameters", 0, None),
    noted("critic.model.lora*", "the critic trains all of its parameters"),
    noted("critic.model.target_modules", "the critic trains all of its parameters"),
    noted("critic.model.exclude_modules", "the critic trains all of its parameters"),
    noted("*.use_liger", "log-probs are computed in chunks already"),
    noted("*.use_fused_kernels", "log-probs are computed in chunks already"),
    noted("*.fused_kernel_options.*", "log-probs are computed in chunks already"),
    noted("*.tiled_mlp.*", "micro-batches go by tokens"),
    VerlKey(
        "*.mtp.enable_train",
        "layers that predict further tokens stay as they are, and do not count in the gradient's norm; with "
        "detach_encoder=false, by which they would change all others, it is refused",
        translate=rewrites.further_tokens,
        is_loud=True,
        asks=bool,
    ),
    noted("*.mtp.enable_rollout", "drafts change the speed alone"),
    noted("*.mtp*", "read with mtp.enable_train alone"),
    noted(f"{MODEL}.torch_dtype", "parameters that learn are float32; the forward pass is of model.dtype"),
    translated(f"{MODEL}.path", "~ is the home directory", (f"{MODEL}.path",), rewrites.model_path(f"{MODEL}.path")),
    translated("critic.model.path", "it is critic.path here", ("critic.path",), rewrites.model_path("critic.path")),
    noted("critic.model.trust_remote_code", f"follows {MODEL}.trust_remote_code"),
    only("critic.model.custom_chat_template", "the critic sees the policy's tokens", None),
    noted("critic.model.enable_gradient_checkpointing", f"follows {MODEL}.enable_gradient_checkpointing"),
    noted("critic.model.enable_activation_offload", f"follows {MODEL}.enable_activation_offload"),
)

MEGATRON = (
    translated(
        f"{ACTOR}.megatron.tensor_model_parallel_size",
        "ranks that split matrices, where they divide the ranks here",
        (f"{ACTOR}.fsdp_config.tensor_parallel_size",),
        rewrites.shards(ACTOR, f"{ACTOR}.fsdp_config.tensor_parallel_size"),
    ),
    translated(
        f"{REF}.megatron.tensor_model_parallel_size",
        "ranks that split matrices, where they divide the ranks here",
        (f"{REF}.fsdp_config.tensor_parallel_size",),
        rewrites.shards(REF, f"{REF}.fsdp_config.tensor_parallel_size"),
    ),
    translated(
        "critic.megatron.tensor_model_parallel_size",
        "ranks that split matrices, where they divide the ranks here",
        ("critic.model.fsdp_config.tensor_parallel_size",),
        rewrites.shards("critic", "critic.model.fsdp_config.tensor_parallel_size"),
    ),
    *(
        translated(
            f"{role}.{name}",
            "ranks that split a sequence, where they divide the ranks here",
            (f"{role}.ulysses_sequence_parallel_size",),
            rewrites.sequence_ranks(f"{role}.ulysses_sequence_parallel_size"),
        )
        for role in (ACTOR, REF, "critic")
        for name in (
            "megatron.context_parallel_size",
            "veomni.ulysses_parallel_size",
            "fsdp_config.ulysses_sequence_parallel_size",
            "model.fsdp_config.ulysses_sequence_parallel_size",
        )
    ),
    *(
        alias(f"{ACTOR}.{backend}.param_offload", f"{ACTOR}.fsdp_config.param_offload")
        for backend in ("megatron", "veomni", "torchtitan", "engine")
    ),
    noted("*.optimizer_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    noted("*.grad_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    noted(f"{REF}.*.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    noted(f"{REF}.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    noted("critic.*.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    noted(f"{ACTOR}.veomni.enable_fsdp_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    arranged("*.pipeline_model_parallel_size", f"{FSDP2}, not by stages", 1, None),
    arranged("*.virtual_pipeline_model_parallel_size", f"{FSDP2}, not by stages", 1, None),
    arranged("*.megatron.expert_*parallel_size", f"{FSDP2}, experts included", 1, None),
    arranged("*.veomni.expert_parallel_size", f"{FSDP2}, experts included", 1, None),
    *(
        translated(
            f"{ACTOR}.{backend}router_replay.mode",
            f"it is {ACTOR}.router_replay.mode here; R3 with the embedded engine alone",
            (f"{ACTOR}.router_replay.mode",),
            rewrites.router_replay,
        )
        for backend in ("", "megatron.", "mindspeed.", "veomni.")
    ),
    only("*.router_replay.mode", "reference and critic choose their experts themselves", "disabled", None),
    noted("*.router_replay.*", "experts are replayed from the trajectories, not from files"),
    only("*.qat.enable", QUANTISED, *OFF),
    noted("*.qat.*", QUANTISED),
    only("*.qat", QUANTISED, None),
    only("*.override_transformer_config.fp8*", QUANTISED, *OFF),
    translated(
        f"{rewrites.MEGATRON}.moe_aux_loss_coeff",
        "read with moe_router_load_balancing_type=aux_loss or global_aux_loss alone, as in Megatron (verl sets none); "
        "the load is that of the mini-batch",
        (f"{ACTOR}.strategy_options",),
        rewrites.balancing_loss,
    ),
    translated(
        f"{rewrites.MEGATRON}.moe_z_loss_coeff",
        f"it is {ACTOR}.strategy_options.moe_z_loss_coeff here",
        (f"{ACTOR}.strategy_options",),
        rewrites.z_loss,
    ),
    *(noted(f"{REF}.megatron.override_transformer_config.{name}", "a reference learns nothing") for name in WEIGHTS),
    *(only(f"*.override_transformer_config.{name}", "of the policy's routers alone", 0, None) for name in WEIGHTS),
    only("*.override_transformer_config.moe_router_bias_update_rate", "a bias of routers stays as loaded", 0, None),
    only("*.override_transformer_config.dsa_indexer_loss_coeff", "only the policy's loss is minimised", 0, None),
    only("*.override_transformer_config.*_dropout", "models are trained without dropout", 0, None),
    noted("*.override_transformer_config.recompute_*", f"{MODEL}.enable_gradient_checkpointing recomputes layers"),
    noted("*.override_transformer_config*", "the layers are those of Hugging Face's model"),
    noted("*.override_ddp_config*", FSDP2),
    only("*.override_mcore_model_config*", "the model's own config.json holds", {}, None),
    only("*.megatron.dtype", "the forward pass is of model.dtype: float32 or bfloat16", "bfloat16", "bf16", None),
    arranged("*.megatron.use_dist_checkpointing", f"weights are read from {MODEL}.path", *OFF),
    noted("*.megatron.*", FSDP2),
    arranged("*.torchtitan.*parallel_size", FSDP2, 1, None),
    arranged("*.torchtitan.data_parallel_shard_size", FSDP2, 1, None),
    noted("*.veomni.*", FSDP2),
    noted("*.torchtitan.*", FSDP2),
    noted("*.automodel.*", FSDP2),
    arranged(f"{ACTOR}.engine.*", FSDP2, 1, *OFF),
    arranged("model_engine", FSDP2, "dp", None),
    arranged("*.model_engine", FSDP2, "dp", None),
    noted("*.layer_name_map.*", "weights are named as Hugging Face names them"),
    only("*.load_weight", "weights are always loaded", True, None),
    noted("*.nccl_timeout", "a call of the workers may take two hours"),
)

FSDP = (
    *(
        translated(
            f"{section}.strategy",
            "fsdp and fsdp2; the models of all other backends are sharded by FSDP2, too",
            (f"{section}.strategy",),
            rewrites.strategy(f"{section}.strategy"),
            is_loud=True,
        )
        for section in (ACTOR, "critic")
    ),
    *(noted(f"{section}.strategy", FSDP2) for section in (REF, "reward_model", "model")),
    *(
        translated(
            f"{section}.fsdp_size",
            "as many as there are ranks, or more, are all of them",
            (f"{ours}.fsdp_size",),
            rewrites.shard_ranks(f"{ours}.fsdp_size"),
        )
        for section, ours in (
            (f"{ACTOR}.fsdp_config", f"{ACTOR}.fsdp_config"),
            (f"{REF}.fsdp_config", f"{REF}.fsdp_config"),
            ("critic.model.fsdp_config", "critic.model.fsdp_config"),
            ("critic.fsdp", "critic.model.fsdp_config"),
            ("critic.fsdp_config", "critic.model.fsdp_config"),
        )
    ),
    translated(
        f"{ACTOR}.fsdp_config.dtype",
        f"bfloat16 is autocast of {MODEL}.dtype=bfloat16",
        (f"{MODEL}.dtype",),
        lambda value, _: {f"{MODEL}.dtype": "float32"} if value in ("float32", "fp32") else {},
    ),
    only("*.fsdp*.dtype", f"every role computes in {MODEL}.dtype", "bfloat16", "bf16", "float32", "fp32", None),
    only(
        "*.fsdp*.model_dtype",
        "parameters that learn are always float32",
        *("fp32", "float32", "bf16", "bfloat16", None),
    ),
    only("*.fsdp*.mixed_precision.*", f"use {MODEL}.dtype", "bf16", "bfloat16", "fp32", "float32", None),
    only("*.fsdp*.mixed_precision", f"use {MODEL}.dtype", None),
    noted("*.fsdp*.offload_policy", f"use {ACTOR}.fsdp_config.param_offload"),
    noted("*.fsdp*.turbo_config.*", TURBO),
    noted("critic.fsdp.*", FSDP2),
    only("model.fsdp_config.cpu_offload", "use param_offload beside it", *OFF),
    only("model.fsdp_config.offload_params", "use param_offload beside it", *OFF),
    translated(
        "model.partial_pretrain",
        "it is model.path of python -m agentrl.sft",
        (),
        rewrites.same_unless_null("model.path"),
    ),
    only("data.multiturn.enable", "python -m agentrl.sft trains on conversations, in data.messages_key", True, None),
    *(
        translated(
            f"data.multiturn.{name}",
            f"it is data.{name} of python -m agentrl.sft",
            (),
            rewrites.same_unless_null(f"data.{name}"),
        )
        for name in ("messages_key", "tools_key")
    ),
    only("data.multiturn.enable_thinking_key", "a template's switches are model.chat_template_kwargs", None),
    *(
        noted(f"*.fsdp_config.{name}", FSDP2)
        for name in (
            "wrap_policy.*",
            "min_num_params",
            "reshard_after_forward",
            "forward_prefetch",
            "use_orig_params",
            "use_no_sync_for_gradient_accumulation",
            "forward_only",
            "strategy",
            "use_torch_compile",
        )
    ),
    noted("*.fsdp_config.seed", "trainer.seed is the seed"),
    noted("*.full_determinism", "a run repeats as trainer.seed says"),
    noted("*.pad_to_length*", "sequences are packed without padding"),
    noted("reward_model.ulysses_sequence_parallel_size", "the reward model's sequences are whole on each rank"),
    *(
        translated(key, f"{MICRO_BATCHES}; a sign of verl's first releases, see above", (), rewrites.old_micro_batch)
        for key in FIRST_NAMES
    ),
    noted("*micro_batch_size*", MICRO_BATCHES),
    noted("*use_dynamic_bsz", MICRO_BATCHES),
    noted("critic.forward_max_token_len_per_gpu", MICRO_BATCHES),
)

TRAINING = (
    translated(
        f"{ACTOR}.policy_loss.loss_mode",
        "the losses of agentrl; others are refused until they are here",
        (f"{ACTOR}.policy_loss.loss_mode",),
        rewrites.policy_loss,
    ),
    *(
        translated(
            f"{ACTOR}{place}.{name}",
            f"an option of loss_mode={mode}, and read with that alone",
            (f"{ACTOR}.policy_loss.options",),
            rewrites.option_of(mode, name),
        )
        for place in (".policy_loss", "")
        for name, mode in (
            ("clip_cov_ratio", "clip_cov"),
            ("clip_cov_lb", "clip_cov"),
            ("clip_cov_ub", "clip_cov"),
            ("kl_cov_ratio", "kl_cov"),
            ("ppo_kl_coef", "kl_cov"),
            ("dro_beta", "dro"),
            ("tau_pos", "sapo"),
            ("tau_neg", "sapo"),
        )
    ),
    translated(
        f"{ACTOR}.clip_ratio",
        "verl reads clip_ratio_low and clip_ratio_high, which are 0.2 unless set, and this only where they are null",
        (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
        rewrites.clip_ratio,
    ),
    translated(
        f"{ACTOR}.loss_agg_mode",
        "verl since 0.6 averages gspo, sapo and geo_mean by seq-mean-token-mean, whatever this says, and by this the "
        "KL and the entropy beside them; here all terms have one mean",
        (f"{ACTOR}.loss_agg_mode",),
        rewrites.aggregation,
        is_loud=True,
    ),
    only(f"{ACTOR}.loss_scale_factor", "the loss is scaled by loss_agg_mode alone", None),
    only("critic.loss_scale_factor", "the loss is scaled by loss_agg_mode alone", None),
    translated(
        "algorithm.use_kl_in_reward",
        "the same; null is false, and in verl's first releases, which have no such key, true unless actor.use_kl_loss",
        ("algorithm.use_kl_in_reward",),
        rewrites.kl_in_reward,
    ),
    translated(
        "algorithm.kl_penalty",
        "the same; a + at its end, which is about gradients, is left out: a reward has none",
        ("algorithm.kl_penalty",),
        rewrites.kl_penalty,
    ),
    *(
        translated(key, rewrites.MINI_BATCHES, (key,), rewrites.mini_batch(role), is_loud=True)
        for role in (ACTOR, "critic")
        for key in (f"{role}.ppo_mini_batch_size",)
    ),
    *(
        translated(key, rewrites.ONE_EPOCH, (key,), rewrites.epochs(key))
        for key in (f"{ACTOR}.ppo_epochs", "critic.ppo_epochs")
    ),
    only(
        f"{ACTOR}.state_masking",
        "answers of tools are never trained on; Search-R1's fork trains on them unless the command says true, as all "
        f"of its scripts do: write {ACTOR}.state_masking=true",
        True,
    ),
    noted("algorithm.state_masking.*", "answers of tools are never trained on"),
    noted(f"{ACTOR}.calculate_*", "the entropy is always measured"),
    noted(f"{ACTOR}.sum_pi_squared_checkpointing", "log-probs are computed in chunks"),
    noted("*.entropy_from_logits_*", "the entropy is computed in chunks"),
    noted("*.entropy_checkpointing", "the entropy is computed in chunks"),
    noted(f"{ACTOR}.use_prefix_grouper", "common beginnings are shared where that is faster"),
    noted("*.data_loader_seed", "the order of mini-batches follows trainer.seed"),
    noted("*.rollout_n", f"it is {ROLLOUT}.n"),
    noted("*.use_torch_compile", f"{ACTOR}.use_torch_compile of python -m agentrl.train compiles whole layers"),
    translated(
        f"{ACTOR}.tis_imp_ratio_cap",
        "the upper bound of the token's importance weight",
        tuple(f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_is_threshold")),
        rewrites.truncated_weights,
    ),
    noted(f"{ACTOR}.use_rollout_log_probs", f"{CORRECTION}.bypass_mode says what the ratio is taken to"),
    alias(f"{REF}.model.path", f"{REF}.path"),
    noted("*.checkpoint.*contents", SAME_CHECKPOINT),
    noted("*.checkpoint.strict", SAME_CHECKPOINT),
    noted("*.checkpoint.mbridge_config*", "the exported policy is Hugging Face's"),
    noted("critic.checkpoint.*", f"{SAME_CHECKPOINT}; {ACTOR}.checkpoint.async_save is for all of it"),
    translated("critic.enable", "a critic is made where the estimator needs one", (), rewrites.critic_enabled),
    translated("critic.shuffle", f"it is {ACTOR}.shuffle here", (), rewrites.critic_shuffle),
)

OPTIM = (
    noted(f"{REF}.optim.*", "the reference does not learn"),
    *(
        entry
        for role in (ACTOR, "critic")
        for section in (f"{role}.optim",)
        for entry in (
            translated(
                f"{section}.lr_warmup_steps",
                "-1 and null leave it to lr_warmup_steps_ratio",
                (f"{section}.lr_warmup_steps",),
                rewrites.warmup(section),
            ),
            translated(
                f"{section}.lr_warmup_steps_ratio",
                "read where lr_warmup_steps gives no number",
                (f"{section}.lr_warmup_steps_ratio",),
                rewrites.warmup_ratio(section),
            ),
            translated(
                f"{section}.clip_grad",
                "verl's newer name of grad_clip: the one that is not 1.0 holds",
                (f"{role}.grad_clip",),
                rewrites.clip_grad(role),
            ),
            *(
                translated(
                    f"{section}.{name}",
                    "it is lr_scheduler_type here",
                    (f"{section}.lr_scheduler_type",),
                    rewrites.scheduler(section) if name == "warmup_style" else rewrites.backend_scheduler(section),
                )
                for name in ("warmup_style", "lr_decay_style", "decay_type")
            ),
            translated(
                f"{section}.lr_scheduler_type",
                "constant, cosine and linear",
                (f"{section}.lr_scheduler_type",),
                rewrites.scheduler(section),
            ),
            alias(f"{section}.min_lr_ratio", f"{section}.min_lr_ratio", "null is 0.0 here"),
            alias(f"{section}.min_lr_factor", f"{section}.min_lr_ratio", off=(0.0, None)),
            *(
                translated(
                    f"{section}.{name}",
                    "it becomes min_lr_ratio, a fraction of lr",
                    (f"{section}.min_lr_ratio",),
                    rewrites.least_rate(section),
                )
                for name in ("min_lr", "lr_min")
            ),
            translated(
                f"{section}.lr_decay_steps",
                "the rate falls over all steps, or is constant",
                (),
                rewrites.decay_steps(section),
            ),
        )
    ),
    translated("*.optim.optimizer", "AdamW", (), rewrites.optimizer),
    *(
        translated(
            f"{role}.optim.name",
            "TorchTitan's AdamW is adamw here",
            (f"{role}.optim.name",),
            rewrites.optimizer_name(f"{role}.optim.name"),
        )
        for role in (ACTOR, "critic")
    ),
    only("*.optim.optimizer_impl", "the optimizer is torch's", "torch.optim", None),
    only("*.optim.total_training_steps", "the schedule runs over the steps of the trainer", -1, None),
    only("*.optim.num_cycles", "cosine falls once", 0.5, None),
    noted("*.optim.zero_indexed_step", "the first step has a rate above 0"),
    only("*.optim.lr_warmup_init", "warm-up rises from 0", 0, None),
    only("*.optim.lr_start", "warm-up rises from 0", 0, None),
    only("*.optim.lr_decay_ratio", "the rate falls over all steps", 1, None),
    only("*.optim.weight_decay_incr_style", "the weight decay is constant", "constant", None),
    only("*.optim.eps", "AdamW's epsilon is 1e-8", 1e-8, None),
    noted("*.optim.lr_wsd_decay_*", "read with lr_decay_style=WSD alone"),
    noted("*.optim.muon_*", "read with Muon alone"),
    noted("*.optim.*_dtype", "the optimizer's state is float32"),
    noted("*.optim.use_*", "the optimizer's state is float32, and in every checkpoint"),
    noted("*.override_optimizer_config.*offload*", f"follows {ACTOR}.fsdp_config.param_offload"),
    noted("*.override_optimizer_config.overlap_cpu_*", f"follows {ACTOR}.fsdp_config.param_offload"),
    noted("*.override_optimizer_config.use_*", "the optimizer's state is float32"),
    only("*.override_optimizer_config", "AdamW's options are keys of optim", {}, None),
    refused("*.override_optimizer_config.*", "AdamW's options are keys of optim"),
)

ENGINE = (
    translated(
        f"{ROLLOUT}.name",
        "SGLang's servers stand for vllm, trtllm, hf and dynamo",
        (f"{ROLLOUT}.name",),
        rewrites.engine,
    ),
    translated(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "the GPUs of one server; the others of the machine hold further servers",
        (f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.num_servers"),
        rewrites.servers,
    ),
    translated(f"{ROLLOUT}.top_k", "-1 and 0 mean all", (f"{ROLLOUT}.top_k",), rewrites.top_k),
    translated(f"{ROLLOUT}.n", "the same; with n_agent it must be 1", (f"{ROLLOUT}.n",), rewrites.group_size),
    alias(f"{ROLLOUT}.n_agent", f"{ROLLOUT}.n", "Search-R1's number of trajectories a prompt"),
    noted(f"{ROLLOUT}.mode", "trajectories always run asynchronously"),
    only(f"{ROLLOUT}.do_sample", f"training always samples; to validate greedily: {ROLLOUT}.val_kwargs", True, None),
    noted(f"{ROLLOUT}.calculate_log_probs", "the engine always returns the log-probs of what it sampled"),
    only(f"{ROLLOUT}.ignore_eos", "a turn ends at the model's end-of-turn token", *OFF),
    translated(
        f"{ROLLOUT}.prompt_length",
        "it is data.max_prompt_length here",
        (),
        rewrites.length_of("data.max_prompt_length"),
    ),
    translated(
        f"{ROLLOUT}.response_length",
        "it is data.max_response_length here",
        (),
        rewrites.length_of("data.max_response_length"),
    ),
    noted(f"{ROLLOUT}.dtype", f"the engine computes in {MODEL}.dtype"),
    arranged(f"{ROLLOUT}.data_parallel_size", f"servers are counted by {ROLLOUT}.num_servers", 1, None),
    arranged(f"{ROLLOUT}.expert_parallel_size", f"use {ROLLOUT}.engine_kwargs.sglang.ep_size", 1, None),
    arranged(f"{ROLLOUT}.moe_tensor_parallel_size", f"use {ROLLOUT}.engine_kwargs.sglang.ep_size", 1, None),
    noted(f"{ROLLOUT}.seed", "trainer.seed is the seed"),
    only(f"{ROLLOUT}.quantization*", QUANTISED, None),
    only(f"{ROLLOUT}.router_config_path", "the router has its own rules", None),
    only(f"{ROLLOUT}.disaggregation.enabled", "a server both reads prompts and generates", *OFF),
    noted(f"{ROLLOUT}.disaggregation.*", "read with disaggregation.enabled alone"),
    translated(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        f"follows {ACTOR}.router_replay.mode; without R3 it is refused",
        (f"{ACTOR}.router_replay.mode",),
        rewrites.told_experts,
    ),
    noted(f"{ROLLOUT}.moe_load_balance_metrics_interval", "the load of experts is not measured"),
    only(f"{ROLLOUT}.skip_rollout", "every step generates", *OFF),
    noted(f"{ROLLOUT}.skip_dump_dir", "every step generates"),
    only("skip.*enable", "every step generates", *OFF),
    noted("skip.*", "every step generates"),
    *(
        noted(f"{ROLLOUT}.{name}", SERVER_ARGUMENT)
        for name in (
            "max_num_batched_tokens",
            "enable_chunked_prefill",
            "cudagraph_capture_sizes",
            "enforce_eager",
            "scheduling_policy",
            "enable_sleep_mode",
            "sglang_rollout_mode",
            "server.*",
            "limit_images",
        )
    ),
    noted(f"{ROLLOUT}.enable_prefix_caching", "what a prompt has in common with earlier ones is computed once"),
    only(f"{ROLLOUT}.logprobs_mode", "log-probs are those of logits / temperature", "processed_logprobs", None),
    noted(f"{ROLLOUT}.over_sample_rate", "all trajectories of a step are waited for, and none is thrown away"),
    noted(f"{ROLLOUT}.skip_tokenizer_init", "engines take and return token ids"),
    noted(f"{ROLLOUT}.multi_stage_wake_up", "with free_cache_engine weights come back before the KV cache"),
    noted(f"{ROLLOUT}.load_format", "the engine is always given the policy's own weights"),
    noted(f"{ROLLOUT}.layered_summon", BUCKETS),
    only(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", BUCKETS, None),
    alias(f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", f"{ROLLOUT}.update_weights_bucket_megabytes"),
    noted(f"{ROLLOUT}.checkpoint_engine.*", BUCKETS),
    noted(f"{ROLLOUT}.disable_log_stats", "the engine's numbers are metrics of each step"),
    noted(f"{ROLLOUT}.engine_kwargs.vllm*", OTHER_ENGINE),
    noted(f"{ROLLOUT}.engine_kwargs.trtllm*", OTHER_ENGINE),
    noted(f"{ROLLOUT}.engine_kwargs.dynamo*", OTHER_ENGINE),
    noted(f"{ROLLOUT}.trace.*", "every trajectory is written to trajectories/"),
    noted(f"{ROLLOUT}.prometheus.*", "the engine's numbers are metrics of each step"),
    translated(
        f"{ROLLOUT}.val_kwargs.temperature",
        "0 validates greedily, a higher one by sampling at it; verl reads nothing else for that",
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("do_sample", "greedy", "temperature")),
        rewrites.validation_temperature,
    ),
    noted(f"{ROLLOUT}.val_kwargs.do_sample", "verl samples in validation where val_kwargs.temperature is above 0"),
    *(
        translated(
            f"{ROLLOUT}.val_kwargs.{name}",
            "read where val_kwargs.temperature is above 0; greedily every response is the same",
            (f"{ROLLOUT}.val_kwargs.{name}",),
            rewrites.if_sampled(f"{ROLLOUT}.val_kwargs.{name}"),
        )
        for name in ("n", "top_p", "top_k")
    ),
    translated(
        f"{ROLLOUT}.n_gpus_per_node",
        "read with rollout.nnodes above 0 alone",
        (f"{ROLLOUT}.n_gpus_per_node",),
        lambda value, values: {f"{ROLLOUT}.n_gpus_per_node": value} if values.get(f"{ROLLOUT}.nnodes") else {},
    ),
    translated(
        f"{TURNS}.max_assistant_turns",
        "null is no limit; with tools and no interaction max_user_turns + 1 is one, too",
        (f"{TURNS}.max_assistant_turns",),
        rewrites.assistant_turns,
    ),
    translated(
        f"{TURNS}.max_user_turns",
        "an interaction's answers; null is no limit. With tools alone it limits max_assistant_turns",
        (f"{TURNS}.max_user_turns",),
        rewrites.user_turns,
    ),
    translated(
        f"{TURNS}.format",
        "the format of tool calls; auto where it is found by the model, as with the conversation formats of verl 0.3 "
        "and 0.4 (chatml, qwen, openai)",
        (f"{TURNS}.format",),
        rewrites.call_format,
    ),
    noted(f"{TURNS}.enable", "agent_name of each row chooses its loop"),
    translated(
        f"{TURNS}.max_turns",
        "the first name of max_assistant_turns",
        (f"{TURNS}.max_assistant_turns",),
        lambda value, values: (
            {}
            if value is None
            else rewrites.assistant_turns(values.get(f"{TURNS}.max_assistant_turns"), values)
            if f"{TURNS}.max_assistant_turns" in values
            else {f"{TURNS}.max_assistant_turns": value}
        ),
    ),
    only(f"{TURNS}.completion_callback", "write an agent loop", None),
    only(f"{TURNS}.function_tool_path", "tools are named in a YAML file", None),
    only(f"{TURNS}.num_repeat_rollouts", "the recipe's own loop is not part of agentrl", None),
    noted(f"{TURNS}.use_inference_chat_template", "sampled tokens are trained on as they are"),
    noted(f"{TURNS}.tokenization_sanity_check_mode", "sampled tokens are trained on as they are"),
    translated(
        f"{ROLLOUT}.agent.default_agent_loop",
        "single_turn_agent is single_turn here",
        (f"{ROLLOUT}.agent.default_agent_loop",),
        rewrites.agent_loop,
    ),
    noted(f"{ROLLOUT}.agent.num_workers", "one event loop runs all trajectories"),
    only(f"{ROLLOUT}.agent.custom_async_server.*", "engines of your own are not part of this version", None),
)

REWARD = (
    alias("reward.custom_reward_function.path", "custom_reward_function.path"),
    translated(
        "custom_reward_function.name",
        "read with path alone; null is compute_score",
        ("custom_reward_function.name",),
        lambda value, values: (
            {"custom_reward_function.name": value} if value and values.get("custom_reward_function.path") else {}
        ),
    ),
    translated(
        "reward.custom_reward_function.name",
        "read with path alone; null is compute_score",
        ("custom_reward_function.name",),
        lambda value, values: (
            {"custom_reward_function.name": value} if value and values.get("reward.custom_reward_function.path") else {}
        ),
    ),
    VerlKey(
        "reward.custom_reward_function.reward_kwargs.*",
        "it is custom_reward_function.reward_kwargs here",
        ours=("custom_reward_function.reward_kwargs",),
        into="custom_reward_function.reward_kwargs",
    ),
    *(
        translated(
            key,
            "naive, prime, batch, dapo and gdpo",
            ("reward_model.reward_manager",),
            rewrites.reward_manager,
        )
        for key in ("reward_model.reward_manager", "reward.reward_manager.name")
    ),
    only("reward.reward_manager.source", "managers of yours: reward_model.reward_manager", "register", None),
    only("reward.reward_manager.module.path", "managers of yours: reward_model.reward_manager", None),
    noted("reward.reward_manager.module.name", "read with module.path alone"),
    *(
        entry
        for section in (
            "reward_model.overlong_buffer",
            "reward_model.reward_kwargs.overlong_buffer_cfg",
            "reward.reward_kwargs.overlong_buffer_cfg",
        )
        for entry in (
            *(
                translated(
                    f"{section}.{name}",
                    f"with the reward manager dapo it is reward_model.overlong_buffer.{name}; the penalty is no part "
                    "of the score, only of the reward",
                    (f"reward_model.overlong_buffer.{name}",),
                    rewrites.overlong(section, name),
                )
                for name in ("enable", "len", "penalty_factor")
            ),
            noted(f"{section}.log", "the penalty is always logged, as score/dapo_overlong_penalty"),
        )
    ),
    *(
        translated(
            f"{section}.max_resp_len",
            "with the reward manager dapo and overlong_buffer_cfg it is reward_model.overlong_buffer.max_resp_len",
            ("reward_model.overlong_buffer.max_resp_len",),
            rewrites.overlong_limit(section),
        )
        for section in ("reward_model.reward_kwargs", "reward.reward_kwargs")
    ),
    refused("reward*.reward_kwargs.*", "managers take their options by reward_model.reward_manager_options"),
    *(
        translated(
            key,
            "a sequence classification model scores alone, by the trainer's own forward pass; with a custom reward "
            "function, SGLang's servers of the model are what the function asks, at reward_router_address",
            REWARD_MODEL,
            rewrites.reward_model,
        )
        for key in ("reward.reward_model.enable", "reward_model.enable")
    ),
    translated(
        "reward_model.max_length",
        "read with reward_model.enable alone",
        ("reward_model.max_length",),
        lambda value, values: {"reward_model.max_length": value} if value and values.get("reward_model.enable") else {},
    ),
    noted("reward_model.param_offload", "read with reward_model.enable alone"),
    noted("reward.reward_model.*", "read with reward_model.enable alone"),
    *(
        noted(f"reward_model.{name}", "read with reward_model.enable alone")
        for name in (
            "model.path",
            "model.trust_remote_code",
            "model.input_tokenizer",
            "model.fsdp_config.*",
            "model.override_config",
            "rollout.*",
            "n_gpus_per_node",
            "nnodes",
            "enable_resource_pool",
            "forward_max_token_len_per_gpu",
            "reward_loop_*",
            "profiler.*",
        )
    ),
    *(
        refused(f"reward_model.{name}", OWN_TRAINER)
        for name in ("model.update", "model.beta_train", "model.optim.*", "mini_batch_size", "elliptical.*")
    ),
    *(
        only(f"reward_model.{name}", "Search-R1's rewards for the form of a response are not here", 0, None)
        for name in ("structure_format_score", "final_format_score", "retrieval_score")
    ),
    noted("reward_model.launch_reward_fn_async", "scoring always runs beside generation"),
    noted("reward_model.use_reward_loop", "scoring always runs beside generation"),
    noted("reward*.num_workers", "reward_model.max_concurrent scorers run at once"),
    *(
        alias(f"{section}.{name}", f"reward_model.sandbox_fusion.{name}")
        for section in ("sandbox_fusion", "reward.sandbox_fusion")
        for name in ("url", "max_concurrent", "memory_limit_mb")
    ),
)

ALGORITHM = (
    translated(
        "algorithm.adv_estimator",
        "the estimators of agentrl; others are refused until they are here",
        ("algorithm.adv_estimator",),
        rewrites.estimator,
    ),
    only("algorithm.use_pf_ppo", "prompts are not re-weighted", *OFF),
    noted("algorithm.pf_ppo.*", "read with use_pf_ppo alone"),
    translated(
        "algorithm.filter_groups.enable",
        "it is algorithm.filter_groups.refill here: generation batches are drawn, as by verl's recipe, until "
        "data.train_batch_size groups differ; what is left over is dropped",
        ("algorithm.filter_groups.refill",),
        rewrites.dynamic_sampling,
    ),
    translated(
        "algorithm.filter_groups.metric",
        "read with filter_groups.enable alone; seq_reward and seq_final_reward are reward here",
        ("algorithm.filter_groups.metric",),
        rewrites.filter_metric,
    ),
    translated(
        "algorithm.filter_groups.max_num_gen_batches",
        "read with filter_groups.enable alone; 0 and below: no limit (verl 0.9.1 has no limit, its recipe has)",
        ("algorithm.filter_groups.max_num_gen_batches",),
        rewrites.generation_batches,
    ),
    noted("algorithm.filter_groups.max_inflight_gen_batches", "a generation batch ends before the next one begins"),
    translated(
        f"{CORRECTION}.rollout_is",
        "the same; in bypass mode with loss_type=reinforce alone, as PPO's ratio corrects by itself",
        (f"{CORRECTION}.rollout_is",),
        rewrites.importance,
    ),
    translated(
        f"{CORRECTION}.rollout_is_threshold",
        "one bound truncates; lower_upper masks",
        tuple(f"{CORRECTION}.rollout_is_{name}" for name in ("threshold", "lower", "outside")),
        rewrites.importance_bounds,
    ),
    translated(
        f"{CORRECTION}.rollout_is_batch_normalize",
        "the same, with rollout_is",
        (f"{CORRECTION}.rollout_is_batch_normalize",),
        rewrites.importance_mean,
    ),
    translated(
        f"{CORRECTION}.rollout_rs",
        "k1's bounds are turned round, as ours are of the trainer's probability to the engine's. Rejected tokens stay "
        "in the loss's denominators, so that an update is not larger where fewer are left",
        (f"{CORRECTION}.reject",),
        rewrites.rejection,
    ),
    *(
        noted(f"{CORRECTION}.{name}", "read with rollout_rs alone")
        for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower")
    ),
    translated(
        f"{CORRECTION}.rollout_token_veto_threshold",
        "the least ratio of a token in a sequence that is kept",
        (f"{CORRECTION}.reject",),
        lambda value, _: {} if value is None else {f"{CORRECTION}.reject": {"veto": value}},
    ),
    translated(f"{CORRECTION}.bypass_mode", rewrites.PROXIMAL, (f"{CORRECTION}.proximal",), rewrites.proximal),
    only(f"{CORRECTION}.loss_type", "bypass mode has ppo_clip and reinforce", "ppo_clip", "reinforce", None),
    only("algorithm.rollout_is*", f"keys of an earlier release: use {CORRECTION}.rollout_is and rollout_rs", *OFF),
    only("algorithm.no_think_rl", "every sampled token is trained on", *OFF),
    *(
        translated(
            f"algorithm.gdpo_{name}",
            f"with gdpo it is algorithm.adv_options.{name}",
            ("algorithm.adv_options",),
            rewrites.gdpo_option(name),
        )
        for name in ("reward_keys", "reward_weights")
    ),
    refused("algorithm.reward_*_coef", OWN_TRAINER),
    noted("distillation.enabled", "a teacher with a model distils"),
    translated(
        f"{LOSS}.loss_mode",
        "sampled tokens by k1, k2, k3 or their other names; forward_kl_topk is scope=top_k, in which all tokens but "
        "the teacher's likeliest are one more, where verl leaves them out",
        ("distillation.scope", "distillation.estimator", "distillation.divergence"),
        rewrites.distillation_loss,
    ),
    translated(
        f"{LOSS}.use_policy_gradient",
        "true is use=advantage, with advantages of rewards mixed in; false is use=loss",
        ("distillation.use",),
        rewrites.distillation_use,
    ),
    translated(f"{LOSS}.topk", "it is distillation.top_k here", ("distillation.top_k",), rewrites.distillation_top_k),
    translated(
        f"{LOSS}.use_task_rewards",
        "false is policy_loss_coef=0",
        ("distillation.policy_loss_coef",),
        rewrites.when_distilled(lambda value, _: {} if value else {"distillation.policy_loss_coef": 0.0}),
    ),
    translated(
        f"{LOSS}.distillation_loss_coef",
        "it is distillation.coef here",
        ("distillation.coef",),
        rewrites.when_distilled(rewrites.distillation_coef),
    ),
    translated(
        f"{LOSS}.loss_max_clamp",
        "it is distillation.max_divergence here",
        ("distillation.max_divergence",),
        rewrites.when_distilled(lambda value, _: {} if value is None else {"distillation.max_divergence": value}),
    ),
    translated(
        f"{LOSS}.log_prob_min_clamp",
        "read with loss_mode=forward_kl_topk alone, where it is distillation.divergence_options.min_logprob",
        ("distillation.divergence_options",),
        rewrites.least_log_prob,
    ),
    noted(f"{LOSS}.*", "the policy loss is the actor's, with its clip"),
    translated(
        f"{TEACHERS}.*.model_path",
        "it is distillation.teacher.path here; of several teachers, which have a key each, distillation.by_source",
        ("distillation.teacher.path", "distillation.by_source"),
        rewrites.teacher_path,
    ),
    noted(f"{TEACHERS}.*.key", "read with the teacher's model_path"),
    noted(f"{TEACHERS}.*", "teachers lie on the trainer's devices, as the reference does"),
    translated(
        "distillation.teacher_key",
        "teachers are chosen by data_source",
        (),
        rewrites.when_distilled(rewrites.teacher_key),
    ),
    *(
        arranged(f"distillation.{name}", "teachers lie on the trainer's devices, as the reference does", 0, 8, None)
        for name in ("nnodes", "n_gpus_per_node")
    ),
    refused("teacher.*", TEACHER),
)

TRAINER = (
    translated(
        "trainer.logger",
        "file is jsonl, which is always written; others that agentrl does not have are left out",
        ("trainer.logger",),
        rewrites.loggers,
    ),
    translated(
        "trainer.log_val_generations",
        "a number below 0 is all of them here",
        ("trainer.log_val_generations",),
        lambda value, _: {
            "trainer.log_val_generations": rewrites.LARGE if isinstance(value, int) and value < 0 else value
        },
    ),
    translated("trainer.device", "cuda and cpu", ("trainer.device",), rewrites.device),
    translated(
        "trainer.resume_from_path",
        "read with resume_mode=resume_path alone",
        ("trainer.resume_from_path",),
        rewrites.resume_path,
    ),
    noted("trainer.balance_batch", "micro-batches are balanced by tokens"),
    translated(
        "trainer.default_hdfs_dir",
        "it is trainer.default_remote_dir here, where it names an object store",
        ("trainer.default_remote_dir",),
        lambda value, _: {"trainer.default_remote_dir": value} if value and "://" in str(value) else {},
    ),
    noted("trainer.max_critic_ckpt_to_keep", f"{SAME_CHECKPOINT}: trainer.max_actor_ckpt_to_keep"),
    alias("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
    noted("trainer.remove_previous_ckpt_in_save", "trainer.max_actor_ckpt_to_keep says how many are kept"),
    noted("trainer.del_local_ckpt_after_load", "checkpoints stay until newer ones push them out"),
    noted("trainer.esi_redundant_time", "a run that is sent SIGTERM saves a checkpoint (trainer.preemption_seconds)"),
    only("trainer.checkpoint_callback_class", "checkpoints are uploaded by trainer.default_remote_dir", None),
    noted("trainer.profile_continuous_steps", PROFILES),
    noted("trainer.*_nsight_options*", PROFILES),
    alias("global_profiler.steps", "trainer.profile_steps", off=(None, [])),
    noted("global_profiler.*", PROFILES),
    noted("*.profiler.*", PROFILES),
    noted("trainer.ray_wait_register_center_timeout", "workers need no register centre"),
    noted("trainer.use_legacy_worker_impl", "there is one kind of worker"),
    noted("trainer.use_v1", "there is one trainer"),
    noted("transfer_queue.*", "batches travel through Ray's object store"),
    noted("trainer.tensorboard_dir", "metrics are in trainer.default_local_dir"),
    noted("trainer.rl_logging_board_dir", "metrics are in trainer.default_local_dir"),
    VerlKey(
        "trainer.worker_env.*",
        "it is ray_init.runtime_env.env_vars here",
        ours=("ray_init.runtime_env.env_vars",),
        into="ray_init.runtime_env.env_vars",
    ),
    VerlKey(
        "ray_kwargs.ray_init.runtime_env.env_vars.*",
        "it is ray_init.runtime_env.env_vars here",
        ours=("ray_init.runtime_env.env_vars",),
        into="ray_init.runtime_env.env_vars",
    ),
    noted("ray_kwargs.*", "use ray_init.address, ray_init.num_cpus and ray_init.timeline_json_file"),
)

BOUND = tuple(f"async_training.{name}" for name in ("max_staleness", "depth", "publish_every"))
ASYNC = (
    translated(
        "actor_rollout_ref.hybrid_engine",
        "false: the engine has devices of its own, and without staleness_threshold rollouts are one step ahead",
        (*BOUND, f"{ROLLOUT}.free_cache_engine"),
        rewrites.separate_engine,
    ),
    *(
        translated(
            f"async_training.{name}",
            rewrites.FULLY_ASYNC,
            ("data.train_batch_size", *BOUND, f"{ROLLOUT}.free_cache_engine"),
            rewrites.fully_async,
        )
        for name in ("staleness_threshold", "trigger_parameter_sync_step", "require_batches")
    ),
    translated(
        "async_training.partial_rollout",
        "trajectories that a publication meets always go on under the next weights; with staleness_threshold=0 it "
        "meets none, and false is the same",
        (),
        rewrites.partial_rollout,
    ),
    *(
        translated(
            f"async_training.{name}",
            f"{value} is an earlier release's {CORRECTION}.bypass_mode=false",
            (f"{CORRECTION}.proximal",),
            rewrites.proximal,
        )
        for name, value in (("use_rollout_log_probs", "false"), ("compute_prox_log_prob", "true"))
    ),
    *(
        translated(
            f"trainer.v1.{name}",
            rewrites.V1_MODES,
            (*BOUND, f"{ROLLOUT}.free_cache_engine"),
            rewrites.v1_trainer,
        )
        for name in ("trainer_mode", "*.num_warmup_batches", "sampler.max_off_policy_threshold")
    ),
    translated(
        "trainer.v1.separate_async.parameter_sync_step",
        "a step is so many updates of ppo_mini_batch_size prompts, and its weights are published",
        (),
        lambda value, values: rewrites.v1_trainer(value, values) and {},
    ),
    noted("trainer.v1.sampler.max_off_policy_strategy", "stale groups are waited for, never dropped"),
    noted("trainer.v1.sampler.sync_refill_failed_groups", "a group of which all trajectories fail teaches nothing"),
    only(
        "trainer.v1.sampler.custom_sampler.*",
        "what is due first is trained on first, whatever a sampler says",
        None,
        {},
    ),
    noted("trainer.v1.sampler.sampler_kwargs*", "read by a sampler of one's own alone"),
    arranged(
        "trainer.v1.separate_async.hybrid_rollout.enable_switch",
        "the trainer's devices do not generate between updates",
        *OFF,
    ),
    noted("trainer.v1.*", "read with enable_switch alone"),
    noted("async_training.use_trainer_do_validate", "rollout workers validate, by the step's own weights"),
    noted("async_training.checkpoint_engine.*", "weights travel by rollout.update_weights_transport"),
    noted("async_training.concurrent_samples_per_replica", "rollout.agent.max_concurrent bounds what runs at once"),
    noted("async_training.partial_rollout_resume", "trajectories always go on"),
    arranged(
        "async_training.use_dynamic_resource_scheduling", "the trainer's devices do not generate between updates", *OFF
    ),
    noted("async_training.dynamic_schedule_*", "read with use_dynamic_resource_scheduling alone"),
    alias("rollout.nnodes", f"{ROLLOUT}.nnodes"),
    alias("rollout.n_gpus_per_node", f"{ROLLOUT}.n_gpus_per_node"),
    alias("rollout.total_epochs", "trainer.total_epochs"),
    translated(
        "rollout.total_rollout_steps",
        "prompts of the whole run, in whole steps of ppo_mini_batch_size * require_batches",
        ("trainer.total_training_steps",),
        rewrites.rollout_steps,
    ),
    *(
        translated(
            key,
            "the same; with async_training.staleness_threshold in publications, each of trigger_parameter_sync_step "
            "steps",
            ("trainer.test_freq",),
            rewrites.validations,
        )
        for key in ("trainer.test_freq", "rollout.test_freq")
    ),
    translated(
        "trainer.save_freq",
        "likewise; -1 is 50 where trajectories go on over updates",
        ("trainer.save_freq",),
        rewrites.checkpoints,
    ),
    noted("rollout.n", "actor_rollout_ref.rollout.n is how many trajectories a prompt has"),
    *(refused(name, ASYNCHRONOUS) for name in ("async_resources.*", "async_flow.*", "rollout.*")),
    noted(f"{ROLLOUT}.standalone_gpu_memory_utilization*", "rollout.gpu_memory_utilization is that of the servers"),
    *(refused(name, ASYNCHRONOUS) for name in ("trainer.n_*_gpus_per_node",)),
)

SEARCH_R1 = (
    translated(
        "max_turns",
        "Search-R1's turns with a search, after which one more answers",
        (f"{TURNS}.max_assistant_turns", f"{TURNS}.force_final_answer"),
        lambda value, _: {f"{TURNS}.max_assistant_turns": value, f"{TURNS}.force_final_answer": True},
    ),
    translated(
        "data.max_response_length",
        "the same; with Search-R1's max_turns it is a turn's length, multi_turn.max_tokens_per_turn",
        ("data.max_response_length", f"{TURNS}.max_tokens_per_turn"),
        rewrites.response_length,
    ),
    only("do_search", "Search-R1's loop always searches; to answer at once: agent_name single_turn in the rows", True),
    *(
        translated(
            key,
            "a key of the search tool, but where tool_config_path names a file of yours",
            (f"{TURNS}.tool_options",),
            rewrites.retriever,
        )
        for key in ("retriever.url", "retriever.topk", "data.max_obs_length")
    ),
)

VERL_KEYS: tuple[VerlKey, ...] = (
    noted("*_target_", "sections have classes of ours"),
    *ASYNC,
    *DATA,
    *REWARD,
    *MEGATRON,
    *OPTIM,
    *MODELS,
    *FSDP,
    *TRAINING,
    *ENGINE,
    *ALGORITHM,
    *TRAINER,
    *SEARCH_R1,
)
