"""The table of verl's keys: of 0.9.1 and 0.7.1, its recipes, its asynchronous trainers and Search-R1's fork.

Keys are matched by the first entry whose pattern fits. A key without an entry that is a key of ours is the same here.
"""

from __future__ import annotations

from agentrl.verl.keys import rewrites
from agentrl.verl.keys.entries import (
    VerlKey,
    consumed,
    fixed,
    gathered,
    ignored,
    renamed,
    split,
    translated,
    unsupported,
    without,
)
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
REPLACED_ENGINE = "SGLang's servers stand for trtllm, hf and dynamo, and for vllm where it is not installed"
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
    renamed("data.train_max_samples", "data.train_max_samples", "-1 means all, which is null here", off=(-1, None)),
    renamed("data.val_max_samples", "data.val_max_samples", "-1 means all, which is null here", off=(-1, None)),
    renamed("data.train_data_num", "data.train_max_samples"),
    renamed("data.val_data_num", "data.val_max_samples"),
    renamed("data.shuffle_train_dataloader", "data.shuffle"),
    renamed("data.seed", "data.seed", "null is 1 here"),
    ignored("data.validation_shuffle", "validation is the same in every order"),
    ignored("data.return_raw_chat", "rows always reach the loops as messages"),
    fixed("data.reward_fn_key", "scorers are chosen by the column data_source", "data_source", None),
    fixed("data.return_raw_input_ids", "use the trajectories of the run", *OFF),
    fixed("data.return_full_prompt", "use the trajectories of the run", *OFF),
    ignored("data.return_multi_modal_inputs", "images always travel with their sequences"),
    fixed("data.video_key", "no video is read", "videos", None),
    fixed("data.audio_key", "no audio is read", "audios", None),
    ignored("data.image_patch_size", "the model's own processor decides"),
    fixed("data.mm_processor_kwargs*", "the model's own processor decides", {}, None),
    ignored("data.*_workers", "rows are read as they are needed, in this process"),
    renamed("data.trust_remote_code", f"{MODEL}.trust_remote_code", off=OFF),
    fixed("data.tokenizer", "the tokenizer is the model's", None),
    renamed("data.tool_config_path", f"{TURNS}.tool_config_path"),
    fixed("data.function_tool_path", "tools are named in a YAML file", None),
    gathered("data.apply_chat_template_kwargs.*", f"{MODEL}.chat_template_kwargs"),
    fixed("data.apply_chat_template_kwargs", f"use {MODEL}.chat_template_kwargs", {}, None),
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
        unread=without("data.custom_cls.path"),
    ),
    translated(
        "data.sampler.class_path",
        "the class of data.sampler.class_name, as data.sampler.name",
        ("data.sampler.name",),
        rewrites.sampler,
    ),
    consumed("data.sampler.class_name", "data.sampler.class_path"),
    fixed("data.datagen.*", "data is not generated while training", None),
    translated(
        "data.max_start_length",
        "the first prompt's length (Search-R1), which is data.max_prompt_length here",
        ("data.max_prompt_length",),
        lambda value, _: {"data.max_prompt_length": value},
    ),
    *(
        unsupported(f"data.{name}", OWN_TRAINER)
        for name in ("filter_accuracy", "accuracy_*", "oversample_factor", "filter_truncate")
    ),
)

MODELS = (
    ignored("*.use_shm", "models and data are read from their own place"),
    fixed("*.model.hf_config_path", "the configuration is the model's own", None),
    fixed(f"{MODEL}.tokenizer_path", "the tokenizer is the model's own", None),
    ignored("critic.model.tokenizer_path", "the critic sees the policy's tokens"),
    fixed("*.model.external_lib", "use trust_remote_code", None),
    renamed(f"{MODEL}.custom_chat_template", f"{MODEL}.chat_template"),
    translated(
        f"{MODEL}.override_config",
        "the same, without model_config around it; attention is computed in one way, and there is no dropout",
        (f"{MODEL}.override_config",),
        rewrites.override_config,
    ),
    ignored("*.override_config.attn_implementation", "attention is computed in one way, without padding"),
    fixed("*.override_config.*dropout", "models are trained without dropout", 0.0, None),
    fixed("*.override_config.*pdrop", "models are trained without dropout", 0.0, None),
    fixed("*.override_config.moe_config.freeze_moe_router", "all parameters of the policy learn", *OFF),
    fixed("*.override_config.model_config", "the model's own config.json holds", {}, None),
    fixed("*.override_config", "the model's own config.json holds", {}, None),
    unsupported("*.override_config.*", "the model's own config.json holds: edit a copy of it"),
    ignored("*.use_remove_padding", "sequences are always packed without padding"),
    translated(
        f"{MODEL}.lora_alpha",
        "read with lora_rank above 0 alone",
        (f"{MODEL}.lora_alpha",),
        lambda value, values: {f"{MODEL}.lora_alpha": value} if values.get(f"{MODEL}.lora_rank") else {},
        unread=without(f"{MODEL}.lora_rank above 0"),
    ),
    renamed(f"{MODEL}.lora.rank", f"{MODEL}.lora_rank", off=(0, None)),
    translated(
        f"{MODEL}.lora.alpha",
        f"read with lora.rank above 0 alone, where it is {MODEL}.lora_alpha",
        (f"{MODEL}.lora_alpha",),
        lambda value, values: {f"{MODEL}.lora_alpha": value} if values.get(f"{MODEL}.lora.rank") else {},
        unread=without(f"{MODEL}.lora.rank above 0"),
        second_name_of=f"{MODEL}.lora_alpha",
    ),
    translated(
        f"{MODEL}.lora.target_modules",
        f"Megatron's names of the layers become those of {MODEL}.target_modules",
        (f"{MODEL}.target_modules",),
        rewrites.adapter_layers,
        second_name_of=f"{MODEL}.target_modules",
    ),
    renamed(f"{MODEL}.lora.adapter_path", f"{MODEL}.lora_adapter_path"),
    fixed(f"{MODEL}.lora.dropout", "adapters are trained without dropout", 0, None),
    renamed(f"{MODEL}.lora.exclude_modules", f"{MODEL}.exclude_modules", off=([], None)),
    fixed(f"{MODEL}.lora.type", "adapters are LoRA's", "lora", None),
    renamed(f"{MODEL}.lora.merge", f"{MODEL}.lora_merge", off=(False, None)),
    ignored(f"{MODEL}.lora.*", "adapters are peft's"),
    fixed("critic.model.lora*rank", "the critic trains all of its parameters", 0, None),
    ignored("critic.model.lora*", "the critic trains all of its parameters"),
    ignored("critic.model.target_modules", "the critic trains all of its parameters"),
    ignored("critic.model.exclude_modules", "the critic trains all of its parameters"),
    VerlKey(
        f"{MODEL}.enable_activation_offloading",
        f"verl has no such key, which examples of 0.6 add by a +: it reads {MODEL}.enable_activation_offload",
        unread=lambda value, _: bool(value),
    ),
    ignored("*.use_liger", "log-probs are computed in chunks already"),
    ignored("*.use_fused_kernels", "log-probs are computed in chunks already"),
    ignored("*.fused_kernel_options.*", "log-probs are computed in chunks already"),
    ignored("*.tiled_mlp.*", "micro-batches go by tokens"),
    VerlKey(
        "*.mtp.enable_train",
        "layers that predict further tokens stay as they are, and do not count in the gradient's norm; with "
        "detach_encoder=false, by which they would change all others, it is refused",
        translate=rewrites.further_tokens,
        is_loud=True,
        asks=lambda value, _: bool(value),
    ),
    ignored("*.mtp.enable_rollout", "drafts change the speed alone"),
    ignored("*.mtp*", "read with mtp.enable_train alone"),
    ignored(f"{MODEL}.torch_dtype", "parameters that learn are float32; the forward pass is of model.dtype"),
    translated(f"{MODEL}.path", "~ is the home directory", (f"{MODEL}.path",), rewrites.model_path(f"{MODEL}.path")),
    translated("critic.model.path", "it is critic.path here", ("critic.path",), rewrites.model_path("critic.path")),
    ignored("critic.model.trust_remote_code", f"follows {MODEL}.trust_remote_code"),
    fixed("critic.model.custom_chat_template", "the critic sees the policy's tokens", None),
    ignored("critic.model.enable_gradient_checkpointing", f"follows {MODEL}.enable_gradient_checkpointing"),
    ignored("critic.model.enable_activation_offload", f"follows {MODEL}.enable_activation_offload"),
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
            second_name_of=f"{role}.ulysses_sequence_parallel_size",
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
        renamed(f"{ACTOR}.{backend}.param_offload", f"{ACTOR}.fsdp_config.param_offload")
        for backend in ("megatron", "veomni", "torchtitan", "engine")
    ),
    ignored("*.optimizer_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    ignored("*.grad_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    ignored(f"{REF}.*.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    ignored(f"{REF}.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    ignored("critic.*.param_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    ignored(f"{ACTOR}.veomni.enable_fsdp_offload", f"follows {ACTOR}.fsdp_config.param_offload"),
    split("*.pipeline_model_parallel_size", f"{FSDP2}, not by stages", 1, None),
    split("*.virtual_pipeline_model_parallel_size", f"{FSDP2}, not by stages", 1, None),
    split("*.megatron.expert_*parallel_size", f"{FSDP2}, experts included", 1, None),
    split("*.veomni.expert_parallel_size", f"{FSDP2}, experts included", 1, None),
    *(
        translated(
            f"{ACTOR}.{backend}router_replay.mode",
            f"it is {ACTOR}.router_replay.mode here; R3 with the embedded engine alone",
            (f"{ACTOR}.router_replay.mode",),
            rewrites.router_replay,
            second_name_of=f"{ACTOR}.router_replay.mode",
        )
        for backend in ("", "megatron.", "mindspeed.", "veomni.")
    ),
    fixed("*.router_replay.mode", "reference and critic choose their experts themselves", "disabled", None),
    ignored("*.router_replay.*", "experts are replayed from the trajectories, not from files"),
    fixed("*.qat.enable", QUANTISED, *OFF),
    ignored("*.qat.*", QUANTISED),
    fixed("*.qat", QUANTISED, None),
    fixed("*.override_transformer_config.fp8*", QUANTISED, *OFF),
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
    *(ignored(f"{REF}.megatron.override_transformer_config.{name}", "a reference learns nothing") for name in WEIGHTS),
    *(fixed(f"*.override_transformer_config.{name}", "of the policy's routers alone", 0, None) for name in WEIGHTS),
    fixed("*.override_transformer_config.moe_router_bias_update_rate", "a bias of routers stays as loaded", 0, None),
    fixed("*.override_transformer_config.dsa_indexer_loss_coeff", "only the policy's loss is minimised", 0, None),
    fixed("*.override_transformer_config.*_dropout", "models are trained without dropout", 0, None),
    ignored("*.override_transformer_config.recompute_*", f"{MODEL}.enable_gradient_checkpointing recomputes layers"),
    ignored("*.override_transformer_config*", "the layers are those of Hugging Face's model"),
    ignored("*.override_ddp_config*", FSDP2),
    fixed("*.override_mcore_model_config*", "the model's own config.json holds", {}, None),
    fixed("*.megatron.dtype", "the forward pass is of model.dtype: float32 or bfloat16", "bfloat16", "bf16", None),
    split("*.megatron.use_dist_checkpointing", f"weights are read from {MODEL}.path", *OFF),
    ignored("*.megatron.*", FSDP2),
    split("*.torchtitan.*parallel_size", FSDP2, 1, None),
    split("*.torchtitan.data_parallel_shard_size", FSDP2, 1, None),
    ignored("*.veomni.*", FSDP2),
    ignored("*.torchtitan.*", FSDP2),
    ignored("*.automodel.*", FSDP2),
    split(f"{ACTOR}.engine.*", FSDP2, 1, *OFF),
    split("model_engine", FSDP2, "dp", None),
    split("*.model_engine", FSDP2, "dp", None),
    ignored("*.layer_name_map.*", "weights are named as Hugging Face names them"),
    fixed("*.load_weight", "weights are always loaded", True, None),
    ignored("*.nccl_timeout", "a call of the workers may take two hours"),
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
    *(ignored(f"{section}.strategy", FSDP2) for section in (REF, "reward_model", "model")),
    *(
        translated(
            f"{section}.fsdp_size",
            "as many as there are ranks, or more, are all of them",
            (f"{ours}.fsdp_size",),
            rewrites.shard_ranks(f"{ours}.fsdp_size"),
            second_name_of=f"{ours}.fsdp_size",
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
    fixed("*.fsdp*.dtype", f"every role computes in {MODEL}.dtype", "bfloat16", "bf16", "float32", "fp32", None),
    fixed(
        "*.fsdp*.model_dtype",
        "parameters that learn are always float32",
        *("fp32", "float32", "bf16", "bfloat16", None),
    ),
    fixed("*.fsdp*.mixed_precision.*", f"use {MODEL}.dtype", "bf16", "bfloat16", "fp32", "float32", None),
    fixed("*.fsdp*.mixed_precision", f"use {MODEL}.dtype", None),
    ignored("*.fsdp*.offload_policy", f"use {ACTOR}.fsdp_config.param_offload"),
    ignored("*.fsdp*.turbo_config.*", TURBO),
    ignored("critic.fsdp.*", FSDP2),
    fixed("model.fsdp_config.cpu_offload", "use param_offload beside it", *OFF),
    fixed("model.fsdp_config.offload_params", "use param_offload beside it", *OFF),
    translated(
        "model.partial_pretrain",
        "it is model.path of python -m agentrl.sft",
        (),
        rewrites.same_unless_null("model.path"),
    ),
    fixed("data.multiturn.enable", "python -m agentrl.sft trains on conversations, in data.messages_key", True, None),
    *(
        translated(
            f"data.multiturn.{name}",
            f"it is data.{name} of python -m agentrl.sft",
            (),
            rewrites.same_unless_null(f"data.{name}"),
        )
        for name in ("messages_key", "tools_key")
    ),
    *(
        fixed(
            f"data.{side}_dict_keys",
            "python -m agentrl.sft trains on conversations: write the two texts as a user's and an assistant's message "
            "into a column messages (docs/sft.md), and leave out data.prompt_key and data.response_key, too",
            None,
        )
        for side in ("prompt", "response")
    ),
    fixed("data.multiturn.enable_thinking_key", "a template's switches are model.chat_template_kwargs", None),
    *(
        ignored(f"*.fsdp_config.{name}", FSDP2)
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
    ignored("*.fsdp_config.seed", "trainer.seed is the seed"),
    ignored("*.full_determinism", "a run repeats as trainer.seed says"),
    ignored("*.pad_to_length*", "sequences are packed without padding"),
    ignored("reward_model.ulysses_sequence_parallel_size", "the reward model's sequences are whole on each rank"),
    *(
        translated(key, f"{MICRO_BATCHES}; a sign of verl's first releases, see above", (), rewrites.old_micro_batch)
        for key in FIRST_NAMES
    ),
    ignored("*micro_batch_size*", MICRO_BATCHES),
    ignored("*use_dynamic_bsz", MICRO_BATCHES),
    ignored("critic.forward_max_token_len_per_gpu", MICRO_BATCHES),
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
            unread=rewrites.is_left_out(rewrites.option_of(mode, name)),
            second_name_of=f"{ACTOR}.policy_loss.{name}",
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
        "verl since 0.4 reads clip_ratio_low and clip_ratio_high, which are 0.2 unless set, and this only where they "
        "are null; up to 0.3.0 this is both bounds",
        (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"),
        rewrites.clip_ratio,
        unread=rewrites.is_no_bound,
    ),
    translated(
        f"{ACTOR}.loss_agg_mode",
        "verl since 0.6 averages gspo, sapo and geo_mean by seq-mean-token-mean, whatever this says, and by this the "
        "KL and the entropy beside them; here all terms have one mean",
        (f"{ACTOR}.loss_agg_mode",),
        rewrites.aggregation,
        is_loud=True,
    ),
    fixed(f"{ACTOR}.loss_scale_factor", "the loss is scaled by loss_agg_mode alone", None),
    fixed("critic.loss_scale_factor", "the loss is scaled by loss_agg_mode alone", None),
    translated(
        "algorithm.use_kl_in_reward",
        "the same; null is false, and in verl's first releases, which have no such key, true unless actor.use_kl_loss",
        ("algorithm.use_kl_in_reward",),
        rewrites.kl_in_reward,
    ),
    translated(
        "algorithm.kl_ctrl.kl_coef",
        "read with algorithm.use_kl_in_reward=true alone; verl up to 0.3.0, which has no such key, subtracts the KL "
        "from the reward unless actor.use_kl_loss",
        ("algorithm.kl_ctrl.kl_coef",),
        lambda value, _: {"algorithm.kl_ctrl.kl_coef": value},
        unread=rewrites.is_without_kl,
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
    fixed(
        f"{ACTOR}.state_masking",
        "answers of tools are never trained on; Search-R1's fork trains on them unless the command says true, as all "
        f"of its scripts do: write {ACTOR}.state_masking=true",
        True,
    ),
    ignored("algorithm.state_masking.*", "answers of tools are never trained on"),
    ignored(f"{ACTOR}.calculate_*", "the entropy is always measured"),
    ignored(f"{ACTOR}.sum_pi_squared_checkpointing", "log-probs are computed in chunks"),
    ignored("*.entropy_from_logits_*", "the entropy is computed in chunks"),
    ignored("*.entropy_checkpointing", "the entropy is computed in chunks"),
    ignored(f"{ACTOR}.use_prefix_grouper", "common beginnings are shared where that is faster"),
    ignored("*.data_loader_seed", "the order of mini-batches follows trainer.seed"),
    ignored("*.rollout_n", f"it is {ROLLOUT}.n"),
    ignored("*.use_torch_compile", f"{ACTOR}.use_torch_compile of python -m agentrl.train compiles whole layers"),
    translated(
        f"{ACTOR}.tis_imp_ratio_cap",
        "the upper bound of the token's importance weight",
        tuple(f"{CORRECTION}.{name}" for name in ("rollout_is", "rollout_is_threshold")),
        rewrites.truncated_weights,
        second_name_of=f"{CORRECTION}.rollout_is_threshold",
    ),
    ignored(f"{ACTOR}.use_rollout_log_probs", f"{CORRECTION}.bypass_mode says what the ratio is taken to"),
    renamed(f"{REF}.model.path", f"{REF}.path"),
    ignored("*.checkpoint.*contents", SAME_CHECKPOINT),
    ignored("*.checkpoint.strict", SAME_CHECKPOINT),
    ignored("*.checkpoint.mbridge_config*", "the exported policy is Hugging Face's"),
    ignored("critic.checkpoint.*", f"{SAME_CHECKPOINT}; {ACTOR}.checkpoint.async_save is for all of it"),
    translated("critic.enable", "a critic is made where the estimator needs one", (), rewrites.critic_enabled),
    translated("critic.shuffle", f"it is {ACTOR}.shuffle here", (), rewrites.critic_shuffle),
)

OPTIM = (
    ignored(f"{REF}.optim.*", "the reference does not learn"),
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
                unread=rewrites.is_left_out(rewrites.warmup_ratio(section)),
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
                    second_name_of=f"{section}.lr_scheduler_type",
                )
                for name in ("warmup_style", "lr_decay_style", "decay_type")
            ),
            translated(
                f"{section}.lr_scheduler_type",
                "constant, cosine and linear",
                (f"{section}.lr_scheduler_type",),
                rewrites.scheduler(section),
            ),
            renamed(f"{section}.min_lr_ratio", f"{section}.min_lr_ratio", "null is 0.0 here"),
            renamed(f"{section}.min_lr_factor", f"{section}.min_lr_ratio", off=(0.0, None)),
            *(
                translated(
                    f"{section}.{name}",
                    "it becomes min_lr_ratio, a fraction of lr",
                    (f"{section}.min_lr_ratio",),
                    rewrites.least_rate(section),
                    second_name_of=f"{section}.min_lr_ratio",
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
    fixed("*.optim.optimizer_impl", "the optimizer is torch's", "torch.optim", None),
    fixed("*.optim.total_training_steps", "the schedule runs over the steps of the trainer", -1, None),
    fixed("*.optim.num_cycles", "cosine falls once", 0.5, None),
    ignored("*.optim.zero_indexed_step", "the first step has a rate above 0"),
    fixed("*.optim.lr_warmup_init", "warm-up rises from 0", 0, None),
    fixed("*.optim.lr_start", "warm-up rises from 0", 0, None),
    fixed("*.optim.lr_decay_ratio", "the rate falls over all steps", 1, None),
    fixed("*.optim.weight_decay_incr_style", "the weight decay is constant", "constant", None),
    fixed("*.optim.eps", "AdamW's epsilon is 1e-8", 1e-8, None),
    ignored("*.optim.lr_wsd_decay_*", "read with lr_decay_style=WSD alone"),
    ignored("*.optim.muon_*", "read with Muon alone"),
    ignored("*.optim.*_dtype", "the optimizer's state is float32"),
    ignored("*.optim.use_*", "the optimizer's state is float32, and in every checkpoint"),
    ignored("*.override_optimizer_config.*offload*", f"follows {ACTOR}.fsdp_config.param_offload"),
    ignored("*.override_optimizer_config.overlap_cpu_*", f"follows {ACTOR}.fsdp_config.param_offload"),
    ignored("*.override_optimizer_config.use_*", "the optimizer's state is float32"),
    fixed("*.override_optimizer_config", "AdamW's options are keys of optim", {}, None),
    unsupported("*.override_optimizer_config.*", "AdamW's options are keys of optim"),
)

ENGINE = (
    translated(
        f"{ROLLOUT}.name",
        REPLACED_ENGINE,
        (f"{ROLLOUT}.name",),
        rewrites.engine,
        is_loud=True,
        asks=rewrites.is_replaced,
    ),
    translated(
        f"{ROLLOUT}.tensor_model_parallel_size",
        "the GPUs of one server; the others of the machine hold further servers",
        (f"{ROLLOUT}.tensor_model_parallel_size", f"{ROLLOUT}.num_servers"),
        rewrites.servers,
    ),
    translated(f"{ROLLOUT}.top_k", "-1 and 0 mean all", (f"{ROLLOUT}.top_k",), rewrites.top_k),
    translated(
        f"{ROLLOUT}.n",
        "the same; with n_agent and env.rollout.n it must be 1",
        (f"{ROLLOUT}.n",),
        rewrites.group_size,
    ),
    translated(
        f"{ROLLOUT}.n_agent",
        "Search-R1's number of trajectories a prompt",
        (f"{ROLLOUT}.n",),
        rewrites.same_unless_null(f"{ROLLOUT}.n"),
    ),
    ignored(f"{ROLLOUT}.mode", "trajectories always run asynchronously"),
    fixed(f"{ROLLOUT}.do_sample", f"training always samples; to validate greedily: {ROLLOUT}.val_kwargs", True, None),
    ignored(f"{ROLLOUT}.calculate_log_probs", "the engine always returns the log-probs of what it sampled"),
    fixed(f"{ROLLOUT}.ignore_eos", "a turn ends at the model's end-of-turn token", *OFF),
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
    ignored(f"{ROLLOUT}.dtype", f"the engine computes in {MODEL}.dtype"),
    split(f"{ROLLOUT}.data_parallel_size", f"servers are counted by {ROLLOUT}.num_servers", 1, None),
    split(f"{ROLLOUT}.expert_parallel_size", f"use {ROLLOUT}.engine_kwargs.sglang.ep_size", 1, None),
    split(f"{ROLLOUT}.moe_tensor_parallel_size", f"use {ROLLOUT}.engine_kwargs.sglang.ep_size", 1, None),
    ignored(f"{ROLLOUT}.seed", "trainer.seed is the seed"),
    fixed(f"{ROLLOUT}.quantization*", QUANTISED, None),
    fixed(f"{ROLLOUT}.router_config_path", "the router has its own rules", None),
    fixed(f"{ROLLOUT}.disaggregation.enabled", "a server both reads prompts and generates", *OFF),
    consumed(f"{ROLLOUT}.disaggregation.*", f"{ROLLOUT}.disaggregation.enabled=true"),
    translated(
        f"{ROLLOUT}.enable_rollout_routing_replay",
        f"follows {ACTOR}.router_replay.mode; without R3 it is refused",
        (f"{ACTOR}.router_replay.mode",),
        rewrites.told_experts,
    ),
    ignored(f"{ROLLOUT}.moe_load_balance_metrics_interval", "the load of experts is not measured"),
    fixed(f"{ROLLOUT}.skip_rollout", "every step generates", *OFF),
    ignored(f"{ROLLOUT}.skip_dump_dir", "every step generates"),
    fixed("skip.*enable", "every step generates", *OFF),
    ignored("skip.*", "every step generates"),
    *(
        ignored(f"{ROLLOUT}.{name}", SERVER_ARGUMENT)
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
    ignored(f"{ROLLOUT}.enable_prefix_caching", "what a prompt has in common with earlier ones is computed once"),
    fixed(f"{ROLLOUT}.logprobs_mode", "log-probs are those of logits / temperature", "processed_logprobs", None),
    ignored(f"{ROLLOUT}.over_sample_rate", "all trajectories of a step are waited for, and none is thrown away"),
    ignored(f"{ROLLOUT}.skip_tokenizer_init", "engines take and return token ids"),
    ignored(f"{ROLLOUT}.multi_stage_wake_up", "with free_cache_engine weights come back before the KV cache"),
    ignored(f"{ROLLOUT}.load_format", "the engine is always given the policy's own weights"),
    ignored(f"{ROLLOUT}.layered_summon", BUCKETS),
    fixed(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", BUCKETS, None),
    renamed(
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", f"{ROLLOUT}.update_weights_bucket_megabytes"
    ),
    ignored(f"{ROLLOUT}.checkpoint_engine.*", BUCKETS),
    ignored(f"{ROLLOUT}.disable_log_stats", "the engine's numbers are metrics of each step"),
    ignored(
        f"{ROLLOUT}.engine_kwargs.vllm*",
        f"verl starts its vLLM otherwise; in a config of agentrl's, vLLM's own arguments go under "
        f"{ROLLOUT}.engine_kwargs.vllm",
    ),
    ignored(f"{ROLLOUT}.engine_kwargs.trtllm*", OTHER_ENGINE),
    ignored(f"{ROLLOUT}.engine_kwargs.dynamo*", OTHER_ENGINE),
    ignored(f"{ROLLOUT}.trace.*", "every trajectory is written to trajectories/"),
    ignored(f"{ROLLOUT}.prometheus.*", "the engine's numbers are metrics of each step"),
    translated(
        f"{ROLLOUT}.val_kwargs.temperature",
        "0 validates greedily, a higher one by sampling at it; verl reads nothing else for that",
        tuple(f"{ROLLOUT}.val_kwargs.{name}" for name in ("do_sample", "greedy", "temperature")),
        rewrites.validation_temperature,
    ),
    ignored(f"{ROLLOUT}.val_kwargs.do_sample", "verl samples in validation where val_kwargs.temperature is above 0"),
    *(
        translated(
            f"{ROLLOUT}.val_kwargs.{name}",
            "read where val_kwargs.temperature is above 0; greedily every response is the same",
            (f"{ROLLOUT}.val_kwargs.{name}",),
            rewrites.if_sampled(f"{ROLLOUT}.val_kwargs.{name}"),
            unread=without(f"{ROLLOUT}.val_kwargs.temperature above 0", quiet),
        )
        for name, quiet in (("n", 1), ("top_p", 1.0), ("top_k", -1))
    ),
    translated(
        f"{ROLLOUT}.n_gpus_per_node",
        "read with rollout.nnodes above 0 alone",
        (f"{ROLLOUT}.n_gpus_per_node",),
        lambda value, values: {f"{ROLLOUT}.n_gpus_per_node": value} if values.get(f"{ROLLOUT}.nnodes") else {},
        unread=without(f"{ROLLOUT}.nnodes above 0"),
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
    ignored(f"{TURNS}.enable", "agent_name of each row chooses its loop"),
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
    fixed(f"{TURNS}.completion_callback", "write an agent loop", None),
    fixed(f"{ROLLOUT}.chat_scheduler", "write an agent loop", None),
    fixed(f"{ROLLOUT}.use_fire_sampling", "the first token is sampled as all others are", *OFF),
    fixed(f"{TURNS}.function_tool_path", "tools are named in a YAML file", None),
    fixed(f"{TURNS}.num_repeat_rollouts", "the recipe's own loop is not part of agentrl", None),
    ignored(f"{TURNS}.use_inference_chat_template", "sampled tokens are trained on as they are"),
    ignored(f"{TURNS}.tokenization_sanity_check_mode", "sampled tokens are trained on as they are"),
    translated(
        f"{ROLLOUT}.agent.default_agent_loop",
        "single_turn_agent is single_turn here",
        (f"{ROLLOUT}.agent.default_agent_loop",),
        rewrites.agent_loop,
    ),
    ignored(f"{ROLLOUT}.agent.num_workers", "one event loop runs all trajectories"),
    fixed(f"{ROLLOUT}.agent.custom_async_server.*", "engines of your own are not part of this version", None),
)

REWARD = (
    renamed("reward.custom_reward_function.path", "custom_reward_function.path"),
    translated(
        "custom_reward_function.name",
        "read with path alone; null is compute_score",
        ("custom_reward_function.name",),
        lambda value, values: (
            {"custom_reward_function.name": value} if value and values.get("custom_reward_function.path") else {}
        ),
        unread=without("custom_reward_function.path", "compute_score"),
    ),
    translated(
        "reward.custom_reward_function.name",
        "read with path alone; null is compute_score",
        ("custom_reward_function.name",),
        lambda value, values: (
            {"custom_reward_function.name": value} if value and values.get("reward.custom_reward_function.path") else {}
        ),
        unread=without("reward.custom_reward_function.path", "compute_score"),
        second_name_of="custom_reward_function.name",
    ),
    gathered("reward.custom_reward_function.reward_kwargs.*", "custom_reward_function.reward_kwargs"),
    *(
        translated(
            key,
            "naive, prime, batch, dapo and gdpo; verl-agent's episode is the score of an environment: the sum of its "
            "rewards",
            ("reward_model.reward_manager",),
            rewrites.reward_manager,
            second_name_of="reward_model.reward_manager",
        )
        for key in rewrites.MANAGERS
    ),
    *(
        entry
        for section in ("reward.reward_manager", "reward_manager")
        for entry in (
            fixed(f"{section}.source", "managers of yours: reward_model.reward_manager", "register", None),
            fixed(f"{section}.module.path", "managers of yours: reward_model.reward_manager", None),
            consumed(f"{section}.module.name", f"{section}.module.path"),
        )
    ),
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
                    f"with the reward manager dapo and enable=true it is reward_model.overlong_buffer.{name}; the "
                    "penalty is no part of the score, only of the reward",
                    (f"reward_model.overlong_buffer.{name}",),
                    rewrites.overlong(section, name),
                    unread=rewrites.is_left_out(rewrites.overlong(section, name)),
                    second_name_of=f"reward_model.overlong_buffer.{name}",
                )
                for name in ("enable", "len", "penalty_factor")
            ),
            ignored(f"{section}.log", "the penalty is always logged, as score/dapo_overlong_penalty"),
        )
    ),
    *(
        translated(
            f"{section}.max_resp_len",
            "with the reward manager dapo and overlong_buffer_cfg it is reward_model.overlong_buffer.max_resp_len",
            ("reward_model.overlong_buffer.max_resp_len",),
            rewrites.overlong_limit(section),
            unread=rewrites.is_left_out(rewrites.overlong_limit(section)),
            second_name_of="reward_model.overlong_buffer.max_resp_len",
        )
        for section in ("reward_model.reward_kwargs", "reward.reward_kwargs")
    ),
    unsupported("reward*.reward_kwargs.*", "managers take their options by reward_model.reward_manager_options"),
    *(
        translated(
            key,
            "a sequence classification model scores alone, by the trainer's own forward pass; with a custom reward "
            "function, servers of the model are what the function asks, at reward_router_address",
            REWARD_MODEL,
            rewrites.reward_model,
            second_name_of="reward_model.enable",
        )
        for key in ("reward.reward_model.enable", "reward_model.enable")
    ),
    *(
        translated(
            key,
            REPLACED_ENGINE,
            ("reward_model.rollout.name",),
            rewrites.reward_engine,
            is_loud=True,
            asks=rewrites.is_reward_engine_replaced,
            second_name_of="reward_model.rollout.name",
        )
        for key in ("reward.reward_model.rollout.name", "reward_model.rollout.name")
    ),
    translated(
        "reward_model.max_length",
        "read with reward_model.enable alone",
        ("reward_model.max_length",),
        lambda value, values: {"reward_model.max_length": value} if value and values.get("reward_model.enable") else {},
        unread=without("reward_model.enable=true"),
    ),
    ignored("reward_model.param_offload", "read with reward_model.enable alone"),
    ignored(
        "reward.reward_model.model_path",
        "read with reward_model.enable alone",
        second_name_of="reward_model.model.path",
    ),
    ignored("reward.reward_model.*", "read with reward_model.enable alone", second_name_of="reward_model.*"),
    *(
        ignored(f"reward_model.{name}", "read with reward_model.enable alone")
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
        unsupported(f"reward_model.{name}", OWN_TRAINER)
        for name in ("model.update", "model.beta_train", "model.optim.*", "mini_batch_size", "elliptical.*")
    ),
    *(
        fixed(f"reward_model.{name}", "Search-R1's rewards for the form of a response are not here", 0, None)
        for name in ("structure_format_score", "final_format_score", "retrieval_score")
    ),
    ignored("reward_model.launch_reward_fn_async", "scoring always runs beside generation"),
    ignored("reward_model.use_reward_loop", "scoring always runs beside generation"),
    ignored("reward*.num_workers", "reward_model.max_concurrent scorers run at once"),
    *(
        renamed(f"{section}.{name}", f"reward_model.sandbox_fusion.{name}")
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
    fixed("algorithm.use_pf_ppo", "prompts are not re-weighted", *OFF),
    consumed("algorithm.pf_ppo.*", "algorithm.use_pf_ppo=true"),
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
        unread=without("algorithm.filter_groups.enable=true"),
    ),
    translated(
        "algorithm.filter_groups.max_num_gen_batches",
        "read with filter_groups.enable alone; 0 and below: no limit (verl 0.9.1 has no limit, its recipe has)",
        ("algorithm.filter_groups.max_num_gen_batches",),
        rewrites.generation_batches,
        unread=without("algorithm.filter_groups.enable=true"),
    ),
    ignored("algorithm.filter_groups.max_inflight_gen_batches", "a generation batch ends before the next one begins"),
    translated(
        f"{CORRECTION}.rollout_is",
        "the same; in bypass mode with loss_type=reinforce alone, as PPO's ratio corrects by itself",
        (f"{CORRECTION}.rollout_is",),
        rewrites.importance,
        unread=rewrites.is_left_out(rewrites.importance),
    ),
    translated(
        f"{CORRECTION}.rollout_is_threshold",
        "read with rollout_is alone; one bound truncates, lower_upper masks",
        tuple(f"{CORRECTION}.{name}" for name in rewrites.BOUNDS),
        rewrites.importance_bounds,
        unread=rewrites.is_left_out(rewrites.importance_bounds),
    ),
    translated(
        f"{CORRECTION}.rollout_is_batch_normalize",
        "the same, with rollout_is",
        (f"{CORRECTION}.rollout_is_batch_normalize",),
        rewrites.importance_mean,
        unread=rewrites.is_left_out(rewrites.importance_mean),
    ),
    translated(
        f"{CORRECTION}.rollout_rs",
        "k1's bounds are turned round, as ours are of the trainer's probability to the engine's. Rejected tokens stay "
        "in the loss's denominators, so that an update is not larger where fewer are left",
        (f"{CORRECTION}.reject",),
        rewrites.rejection,
    ),
    *(
        consumed(f"{CORRECTION}.{name}", f"{CORRECTION}.rollout_rs")
        for name in ("rollout_rs_threshold", "rollout_rs_threshold_lower")
    ),
    translated(
        f"{CORRECTION}.rollout_token_veto_threshold",
        "the least ratio of a token in a sequence that is kept",
        (f"{CORRECTION}.reject",),
        lambda value, _: {} if value is None else {f"{CORRECTION}.reject": {"veto": value}},
    ),
    translated(f"{CORRECTION}.bypass_mode", rewrites.PROXIMAL, (f"{CORRECTION}.proximal",), rewrites.proximal),
    fixed(f"{CORRECTION}.loss_type", "bypass mode has ppo_clip and reinforce", "ppo_clip", "reinforce", None),
    translated(
        "algorithm.rollout_is",
        f"with rollout_is_threshold it is {CORRECTION}.rollout_is of rollout_is_level; a weight outside bounds is by "
        "rollout_is_mode, and a sequence with a token below rollout_is_veto_threshold weighs nothing",
        (*(f"{CORRECTION}.{name}" for name in ("rollout_is", *rewrites.BOUNDS)), f"{CORRECTION}.reject"),
        rewrites.first_importance,
        unread=rewrites.is_left_out(rewrites.first_importance),
        second_name_of=f"{CORRECTION}.rollout_is",
    ),
    *(
        consumed(f"algorithm.rollout_is_{name}", "algorithm.rollout_is=true")
        for name in ("threshold", "threshold_lower", "level", "mode", "veto_threshold")
    ),
    fixed("algorithm.no_think_rl", "every sampled token is trained on", *OFF),
    *(
        translated(
            f"algorithm.gdpo_{name}",
            f"with gdpo it is algorithm.adv_options.{name}",
            ("algorithm.adv_options",),
            rewrites.gdpo_option(name),
            unread=rewrites.is_left_out(rewrites.gdpo_option(name)),
        )
        for name in ("reward_keys", "reward_weights")
    ),
    unsupported("algorithm.reward_*_coef", OWN_TRAINER),
    ignored("distillation.enabled", "a teacher with a model distils"),
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
    ignored(f"{LOSS}.*", "the policy loss is the actor's, with its clip"),
    translated(
        f"{TEACHERS}.*.model_path",
        "it is distillation.teacher.path here; of several teachers, which have a key each, distillation.by_source",
        ("distillation.teacher.path", "distillation.by_source"),
        rewrites.teacher_path,
    ),
    ignored(f"{TEACHERS}.*.key", "read with the teacher's model_path"),
    ignored(f"{TEACHERS}.*", "teachers lie on the trainer's devices, as the reference does"),
    translated(
        "distillation.teacher_key",
        "teachers are chosen by data_source",
        (),
        rewrites.when_distilled(rewrites.teacher_key),
    ),
    *(
        split(f"distillation.{name}", "teachers lie on the trainer's devices, as the reference does", 0, 8, None)
        for name in ("nnodes", "n_gpus_per_node")
    ),
    unsupported("teacher.*", TEACHER),
)

TRAINER = (
    translated(
        "trainer.logger",
        "file is jsonl, which is always written; others that agentrl does not have are left out",
        ("trainer.logger",),
        rewrites.loggers,
        is_loud=True,
        asks=rewrites.leaves_loggers_out,
    ),
    *(
        translated(
            f"trainer.{name}",
            "trainer.log_val_generations, by its first name, too; a number below 0 is all of them here",
            ("trainer.log_val_generations",),
            lambda value, _: {
                "trainer.log_val_generations": rewrites.LARGE if isinstance(value, int) and value < 0 else value
            },
            second_name_of="trainer.log_val_generations",
        )
        for name in ("log_val_generations", "val_generations_to_log_to_wandb")
    ),
    translated("trainer.device", "cuda and cpu", ("trainer.device",), rewrites.device),
    translated(
        "trainer.resume_from_path",
        "read with resume_mode=resume_path alone",
        ("trainer.resume_from_path",),
        rewrites.resume_path,
        unread=without("trainer.resume_mode=resume_path"),
    ),
    ignored("trainer.balance_batch", "micro-batches are balanced by tokens"),
    translated(
        "trainer.default_hdfs_dir",
        "it is trainer.default_remote_dir here, where it names an object store",
        ("trainer.default_remote_dir",),
        lambda value, _: {"trainer.default_remote_dir": value} if value and "://" in str(value) else {},
    ),
    ignored("trainer.max_critic_ckpt_to_keep", f"{SAME_CHECKPOINT}: trainer.max_actor_ckpt_to_keep"),
    renamed("trainer.max_ckpt_to_keep", "trainer.max_actor_ckpt_to_keep"),
    ignored("trainer.remove_previous_ckpt_in_save", "trainer.max_actor_ckpt_to_keep says how many are kept"),
    ignored("trainer.del_local_ckpt_after_load", "checkpoints stay until newer ones push them out"),
    ignored(
        "trainer.esi_redundant_time",
        "a run that is sent SIGTERM saves a checkpoint (trainer.preemption_seconds); trainer.budget ends one in time",
    ),
    fixed("trainer.checkpoint_callback_class", "checkpoints are uploaded by trainer.default_remote_dir", None),
    ignored("trainer.profile_continuous_steps", PROFILES),
    ignored("trainer.*_nsight_options*", PROFILES),
    renamed("global_profiler.steps", "trainer.profile_steps", off=(None, [])),
    ignored("global_profiler.*", PROFILES),
    ignored("*.profiler.*", PROFILES),
    ignored("trainer.ray_wait_register_center_timeout", "workers need no register centre"),
    ignored("trainer.use_legacy_worker_impl", "there is one kind of worker"),
    ignored("trainer.use_v1", "there is one trainer"),
    ignored("transfer_queue.*", "batches travel through Ray's object store"),
    ignored("trainer.tensorboard_dir", "metrics are in trainer.default_local_dir"),
    ignored("trainer.rl_logging_board_dir", "metrics are in trainer.default_local_dir"),
    gathered("trainer.worker_env.*", "ray_init.runtime_env.env_vars"),
    gathered("ray_kwargs.ray_init.runtime_env.env_vars.*", "ray_init.runtime_env.env_vars"),
    ignored("ray_kwargs.*", "use ray_init.address, ray_init.num_cpus and ray_init.timeline_json_file"),
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
    ignored("trainer.v1.sampler.max_off_policy_strategy", "stale groups are waited for, never dropped"),
    ignored("trainer.v1.sampler.sync_refill_failed_groups", "a group of which all trajectories fail teaches nothing"),
    fixed(
        "trainer.v1.sampler.custom_sampler.*",
        "what is due first is trained on first, whatever a sampler says",
        None,
        {},
    ),
    ignored("trainer.v1.sampler.sampler_kwargs*", "read by a sampler of one's own alone"),
    split(
        "trainer.v1.separate_async.hybrid_rollout.enable_switch",
        "the trainer's devices do not generate between updates",
        *OFF,
    ),
    ignored("trainer.v1.*", "read with enable_switch alone"),
    ignored("async_training.use_trainer_do_validate", "rollout workers validate, by the step's own weights"),
    ignored("async_training.checkpoint_engine.*", "weights travel by rollout.update_weights_transport"),
    ignored("async_training.concurrent_samples_per_replica", "rollout.agent.max_concurrent bounds what runs at once"),
    ignored("async_training.partial_rollout_resume", "trajectories always go on"),
    split(
        "async_training.use_dynamic_resource_scheduling", "the trainer's devices do not generate between updates", *OFF
    ),
    consumed("async_training.dynamic_schedule_*", "async_training.use_dynamic_resource_scheduling=true"),
    renamed("rollout.nnodes", f"{ROLLOUT}.nnodes"),
    renamed("rollout.n_gpus_per_node", f"{ROLLOUT}.n_gpus_per_node"),
    translated(
        "trainer.critic_warmup",
        "verl's policy learns from the step of that number on; here it is the number of steps before that one",
        ("trainer.critic_warmup",),
        lambda value, _: {"trainer.critic_warmup": max(0, value - 1) if isinstance(value, int) else value},
    ),
    renamed("rollout.total_epochs", "trainer.total_epochs"),
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
    ignored("rollout.n", "actor_rollout_ref.rollout.n is how many trajectories a prompt has"),
    *(unsupported(name, ASYNCHRONOUS) for name in ("async_resources.*", "async_flow.*", "rollout.*")),
    ignored(f"{ROLLOUT}.standalone_gpu_memory_utilization*", "rollout.gpu_memory_utilization is that of the servers"),
    *(unsupported(name, ASYNCHRONOUS) for name in ("trainer.n_*_gpus_per_node",)),
)

SEARCH_R1 = (
    translated(
        "max_turns",
        "Search-R1's turns with a search, after which one more answers",
        (f"{TURNS}.max_assistant_turns", f"{TURNS}.force_final_answer"),
        lambda value, _: {f"{TURNS}.max_assistant_turns": value, f"{TURNS}.force_final_answer": True},
        second_name_of=f"{TURNS}.max_assistant_turns",
    ),
    translated(
        "data.max_response_length",
        "the same; with Search-R1's max_turns or verl-agent's env.max_steps it is a turn's length, "
        "multi_turn.max_tokens_per_turn, and a trajectory has room for all turns",
        ("data.max_response_length", f"{TURNS}.max_tokens_per_turn"),
        rewrites.response_length,
    ),
    fixed("do_search", "Search-R1's loop always searches; to answer at once: agent_name single_turn in the rows", True),
    *(
        translated(
            key,
            "a key of the search tool, but where tool_config_path names a file of yours",
            (f"{TURNS}.tool_options",),
            rewrites.retriever,
            unread=rewrites.is_left_out(rewrites.retriever),
        )
        for key in ("retriever.url", "retriever.topk", "data.max_obs_length")
    ),
)

VERL_AGENT = (
    translated(
        "algorithm.gigpo.step_advantage_w",
        "with gigpo it is algorithm.adv_options.step_advantage_w, with the authors' over_turns=true, and "
        "algorithm.gamma is step_gamma",
        ("algorithm.adv_options",),
        rewrites.gigpo("step_advantage_w"),
        unread=without("algorithm.adv_estimator=gigpo"),
    ),
    translated(
        "algorithm.gigpo.mode",
        "with gigpo mean_std_norm is algorithm.norm_adv_by_std_in_grpo=true, mean_norm is false",
        ("algorithm.norm_adv_by_std_in_grpo",),
        rewrites.gigpo("mode"),
        unread=without("algorithm.adv_estimator=gigpo"),
    ),
    fixed(
        "algorithm.gigpo.enable_similarity",
        "states are equal or not: leave out of an observation what differs between visits, or name the state by "
        "`state` (docs/interactions.md)",
        False,
    ),
    consumed("algorithm.gigpo.similarity_thresh", "algorithm.gigpo.enable_similarity=true"),
    translated(
        "env.env_name",
        f"{TURNS}.interaction_config_path names the environment here; its step() gives -0.1 for an invalid action, "
        "which is taken off there by default",
        (),
        rewrites.environment,
        is_loud=True,
    ),
    translated(
        "env.max_steps",
        "the most steps of an episode, each a turn of the policy",
        (f"{TURNS}.max_assistant_turns", f"{TURNS}.max_user_turns"),
        lambda value, _: {f"{TURNS}.max_assistant_turns": value, f"{TURNS}.max_user_turns": value},
        second_name_of=f"{TURNS}.max_assistant_turns",
    ),
    translated(
        "env.rollout.n",
        "verl-agent's number of episodes a prompt",
        (f"{ROLLOUT}.n",),
        rewrites.same_unless_null(f"{ROLLOUT}.n"),
    ),
    split(
        "env.history_length", "the policy reads the whole episode, in which max_response_length has to hold all steps"
    ),
    ignored("env.seed", "an environment's seed is in the row: interaction_kwargs.seed"),
    *(
        ignored(f"env.resources_per_worker.{name}", "an environment lives in a thread of the rollout's process")
        for name in ("num_cpus", "num_gpus")
    ),
    *(
        unsupported(f"env.{name}.*", "an environment's own arguments are under config.kwargs of its interaction")
        for name in ("alfworld", "search", "sokoban", "webshop")
    ),
    fixed(
        f"{ACTOR}.use_invalid_action_penalty",
        "the environment's step() gives the penalty here: let it give minus the coefficient for an invalid action, and "
        f"write {ACTOR}.use_invalid_action_penalty=false",
        False,
    ),
    consumed(f"{ACTOR}.invalid_action_penalty_coef", f"{ACTOR}.use_invalid_action_penalty=true"),
)

VERL_KEYS: tuple[VerlKey, ...] = (
    ignored("*_target_", "sections have classes of ours"),
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
    *VERL_AGENT,
)
