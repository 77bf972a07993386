"""Every config key, its type, its default and what it does. Importable without torch.

The classes mirror the Hydra groups under `configs/`. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl.config.parallel import ActorFSDPConfig, FSDPConfig, Parallel
from agentrl.config.rollout import RolloutConfig
from agentrl.config.section import Section

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
KLType = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"]
Loggers = Annotated[
    list[Literal["console", "jsonl", "tensorboard", "wandb"]],
    BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
]


class DataConfig(Section):
    """`data.*`"""

    train_files: str | list[str] = "quickstart"
    """Parquet files or glob patterns; `quickstart` means the made-up tasks of `python -m data_prep.quickstart`."""
    val_files: str | list[str] | None = None
    """The same for validation; null: no validation. With train_files=quickstart the default is `quickstart`, too."""
    prompt_key: str = "prompt"
    """The column that holds the messages."""
    image_key: str | None = "images"
    """The column, where there is one, with a row's images: in a message <image> stands for the next of them. null: no
    images are read."""
    train_batch_size: int = Field(32, gt=0)
    """Prompts a step."""
    val_batch_size: int | None = Field(None, gt=0)
    """Prompts validated at once; null: all."""
    train_max_samples: int | None = Field(None, gt=0)
    """Use only the first so many rows."""
    val_max_samples: int | None = Field(None, gt=0)
    max_prompt_length: int = Field(512, gt=0)
    """Tokens of the first rendered prompt, tools included."""
    max_response_length: int = Field(512, gt=0)
    """Tokens after the first prompt, over all turns, tool answers included."""
    filter_overlong_prompts: bool = True
    """True: leave out rows whose prompt is too long, and count them; False: refuse the data set, naming the first."""
    on_bad_row: Literal["error", "skip"] = "error"
    """What to do with a row that does not fit the schema: stop and name it, or skip and count it."""
    shuffle: bool = True
    seed: int = Field(1, ge=0)
    """Seed of the data order."""


class ModelConfig(Section):
    """`actor_rollout_ref.model.*`"""

    path: str = "quickstart"
    """A Hugging Face model directory or name; `quickstart` makes and warms up the tiny policy first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type of policy, reference and engine."""
    trust_remote_code: bool = False
    enable_gradient_checkpointing: bool = False
    """Keep only the input of each decoder layer for the backward pass, and compute the layer again."""
    enable_activation_offload: bool = False
    """Keep these inputs in host memory. Only with enable_gradient_checkpointing and a GPU."""
    lora_rank: int = Field(0, ge=0)
    """Rank of LoRA's adapters (arXiv:2106.09685), which are then all that is trained; 0: no adapters."""
    lora_alpha: int = Field(16, gt=0)
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Literal["all-linear"] | Annotated[list[str], Field(min_length=1)] = "all-linear"
    """Linear layers that get adapters, e.g. [q_proj,v_proj]; all-linear: all but the head."""
    lora_adapter_path: str | None = None
    """A folder of adapters in peft's format to start from; null: adapters that change nothing yet."""
    chat_template: str | None = None
    """A Jinja file that replaces the tokenizer's chat template."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further variables for the chat template or renderer, e.g. enable_thinking."""


class OptimConfig(Section):
    """`*.optim.*`"""

    name: Literal["adamw", "muon"] = "adamw"
    """muon: matrices by Muon at `lr`, everything else by AdamW at `adamw_lr`."""
    lr: float = Field(1e-6, gt=0)
    adamw_lr: float | None = Field(None, gt=0)
    """Only with name=muon."""
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = Field(0.01, ge=0)
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps in which the rate rises to `lr`. The whole schedule counts the training steps in which the role learns: the
    policy's begins after trainer.critic_warmup."""
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = "constant"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Where cosine and linear end, as a fraction of `lr`."""


class PolicyLossConfig(Section):
    """`actor_rollout_ref.actor.policy_loss.*`"""

    loss_mode: Literal["vanilla", "gspo"] = "vanilla"
    """vanilla: PPO's clipped ratio by token; gspo: by sequence (arXiv:2507.18071)."""


class CheckpointConfig(Section):
    """`*.checkpoint.*`: of the run's checkpoints, which hold the critic, too."""

    async_save: bool = False
    """Go on with the next step when the weights are copied to host memory, and write them meanwhile."""


class ActorConfig(Section):
    """`actor_rollout_ref.actor.*`"""

    ppo_mini_batch_size: int = Field(16, gt=0)
    """Prompts an optimizer step; must divide data.train_batch_size."""
    ppo_epochs: int = Field(1, gt=0)
    ppo_max_token_len_per_gpu: int = Field(16384, gt=0)
    """Tokens a micro-batch and rank (with ulysses_sequence_parallel_size, ranks share one); changes memory, never the
    result."""
    clip_ratio: float | None = Field(None, gt=0)
    """Both clip bounds at once; set this or the two below. With none of the three set: 0.2."""
    clip_ratio_low: float | None = Field(None, gt=0)
    """The ratio is clipped from below at 1 - this; null: 0.2."""
    clip_ratio_high: float | None = Field(None, gt=0)
    """The ratio is clipped from above at 1 + this; null: 0.2."""
    clip_ratio_c: float = Field(3.0, gt=1)
    """Dual-clip bound for negative advantages (arXiv:1912.09729); vanilla loss only."""
    loss_agg_mode: LossAggMode = "token-mean"
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = Field(0.001, ge=0)
    """Only with use_kl_loss."""
    kl_loss_type: KLType = "low_var_kl"
    """Only with use_kl_loss."""
    grad_clip: float = Field(1.0, gt=0)
    shuffle: bool = True
    """Shuffle the prompts over the mini-batches."""
    freeze_vision_tower: bool = False
    """Train nothing of a vision-language model's vision tower, in the critic neither; adapters stay out of it, too."""
    use_torch_compile: bool = False
    """Compile the decoder layers of policy, reference and critic by torch.compile, in the first steps."""
    ulysses_sequence_parallel_size: int = Field(1, gt=0)
    """Ranks that split each micro-batch's tokens (arXiv:2309.14509); they exchange them for heads in attention."""
    policy_loss: PolicyLossConfig = PolicyLossConfig()
    optim: OptimConfig = OptimConfig()
    fsdp_config: ActorFSDPConfig = ActorFSDPConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def parallel(self) -> Parallel:
        return Parallel.of(self.ulysses_sequence_parallel_size, self.fsdp_config)

    @property
    def clip_low(self) -> float:
        """The lower clip bound that holds."""
        return self.clip_ratio_low or self.clip_ratio or 0.2

    @property
    def clip_high(self) -> float:
        """The upper clip bound that holds."""
        return self.clip_ratio_high or self.clip_ratio or 0.2


class RefConfig(Section):
    """`actor_rollout_ref.ref.*`"""

    path: str | None = None
    """Model of the reference policy; null: actor_rollout_ref.model.path."""
    log_prob_max_token_len_per_gpu: int = Field(16384, gt=0)
    ulysses_sequence_parallel_size: int | None = Field(None, gt=0)
    """null: the actor's."""
    fsdp_config: FSDPConfig = FSDPConfig()


class ActorRolloutRefConfig(Section):
    """`actor_rollout_ref.*`"""

    model: ModelConfig = ModelConfig()
    actor: ActorConfig = ActorConfig()
    rollout: RolloutConfig = RolloutConfig()
    ref: RefConfig = RefConfig()

    @property
    def ref_parallel(self) -> Parallel:
        sequence = self.ref.ulysses_sequence_parallel_size or self.actor.ulysses_sequence_parallel_size
        return Parallel.of(sequence, self.ref.fsdp_config)


class CriticModelConfig(Section):
    """`critic.model.*`"""

    fsdp_config: FSDPConfig = FSDPConfig()


class CriticConfig(Section):
    """`critic.*`: only with an advantage estimator that needs values (gae)."""

    path: str | None = None
    """Model the critic starts from; null: the policy's start."""
    ppo_mini_batch_size: int | None = Field(None, gt=0)
    """null: the actor's."""
    ppo_epochs: int | None = Field(None, gt=0)
    """null: the actor's."""
    ppo_max_token_len_per_gpu: int = Field(16384, gt=0)
    cliprange_value: float = Field(0.5, gt=0)
    loss_agg_mode: LossAggMode = "token-mean"
    grad_clip: float = Field(1.0, gt=0)
    ulysses_sequence_parallel_size: int = Field(1, gt=0)
    """As the actor's."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    model: CriticModelConfig = CriticModelConfig()

    @property
    def parallel(self) -> Parallel:
        return Parallel.of(self.ulysses_sequence_parallel_size, self.model.fsdp_config)


class SandboxFusionConfig(Section):
    """`reward_model.sandbox_fusion.*`: where programs are run that a scorer judges (data sources `code/*`)."""

    url: str | None = None
    """A server that speaks SandboxFusion's API, e.g. http://127.0.0.1:8080 for `python -m sandbox.server`."""
    max_concurrent: int = Field(64, gt=0)
    """Programs judged at once."""
    memory_limit_mb: int = Field(1024, gt=0)
    """MiB that a program may use, its tests included."""
    timeout: float = Field(10.0, gt=0)
    """Running time of a program, all of its tests together; below reward_model.timeout, within which the server has to
    answer."""


class JudgeConfig(Section):
    """`reward_model.judge.*`: a language model that scores the data sources `judge/*`, and those named here, by a whole
    number from 0 to 10; a tenth of it is the trajectory's score."""

    base_url: str | None = None
    """An OpenAI-compatible endpoint, with its /v1."""
    model: str | None = None
    """The model's name there."""
    api_key_env: str | None = None
    """The environment variable that holds the endpoint's key; null: none is sent."""
    data_sources: list[str] = []
    """Further data sources that the judge scores, in place of their own scorers; * stands for anything."""
    prompt: str | None = None
    """A Jinja file with the judge's instructions, made of ground_truth, extra_info, data_source and max_score; null: it
    judges how well the assistant did what it was asked, by the ground truth where there is one."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Fields of each request, beside and over temperature 0, max_tokens 1024 and response_format with a verdict's JSON
    schema; null leaves one of these out."""
    max_concurrent: int = Field(32, gt=0)
    """Trajectories judged at once."""
    timeout: float = Field(30.0, gt=0)
    """After which a request is given up and made again; below reward_model.timeout, which counts all of them."""


class RewardConfig(Section):
    """`reward_model.*`"""

    timeout: float = Field(60.0, gt=0)
    """Deadline of scoring one trajectory; waiting for one of max_concurrent places, for the sandbox's queue or for a
    math worker does not count."""
    max_concurrent: int = Field(64, gt=0)
    """Scorers that run at once."""
    success_threshold: float = 1.0
    """A trajectory whose score is at least this is a success: in success rates and pass@k, never in what is trained on.
    """
    sandbox_fusion: SandboxFusionConfig = SandboxFusionConfig()
    judge: JudgeConfig = JudgeConfig()


class ScoreModelConfig(Section):
    """`reward_model.model.*`: only with reward_model.enable."""

    path: str | None = None
    """A sequence classification model with one label, in Hugging Face format."""
    trust_remote_code: bool = False
    coef: float = 1.0
    """Weight of its score beside that of the scorer."""


class RewardModelConfig(RewardConfig):
    """`reward_model.*` of a training: the scorers, and a reward model beside them."""

    enable: bool = False
    """Add a reward model's score to that of the scorer, which is 0 where the data source has none."""
    model: ScoreModelConfig = ScoreModelConfig()
    max_length: int | None = Field(None, gt=0)
    """Tokens of a conversation for the reward model, of which the last are kept; null: as many as it can read."""
    forward_max_token_len_per_gpu: int = Field(16384, gt=0)
    """Tokens of the reward model's micro-batches; changes memory, never the result."""
    enable_resource_pool: bool = False
    """Devices of its own for the reward model; false: those of the trainer."""
    nnodes: int = Field(1, gt=0)
    """Machines of these. Only with enable_resource_pool."""
    n_gpus_per_node: int = Field(1, gt=0)
    """Devices on each of them. Only with enable_resource_pool."""


class CustomRewardConfig(Section):
    """`custom_reward_function.*`"""

    path: str | None = None
    """A Python file; its function replaces the scorers by data source."""
    name: str = "compute_score"
    reward_kwargs: dict[str, Any] = Field(default_factory=dict)


class ToolsConfig(Section):
    """`tools.*`: all tools of the run together; each tool's own keys are in its YAML."""

    max_concurrent: int | None = Field(None, gt=0)
    """Calls that run at once; null: only the limits of each tool."""
    max_rate: float | None = Field(None, gt=0)
    """Calls that begin in a second, on average."""
    client_id: str | None = None
    """The name by which servers know this run, to share their capacity fairly between runs; null:
    trainer.project_name/trainer.experiment_name."""
    cassette: Literal["record", "replay"] | None = None
    """record: keep what tools and interactions answer; replay: give those answers again, and ask no server."""
    cassette_path: str | None = None
    """The file of a cassette."""


class KLCtrlConfig(Section):
    """`algorithm.kl_ctrl.*`: only with use_kl_in_reward."""

    type: Literal["fixed", "adaptive"] = "fixed"
    kl_coef: float = Field(0.001, ge=0)
    horizon: int = Field(10000, gt=0)
    """adaptive only."""
    target_kl: float = Field(0.1, gt=0)
    """adaptive only."""


class FilterGroupsConfig(Section):
    """`algorithm.filter_groups.*`"""

    enable: bool = True
    """Save the policy's update the work on sequences without advantage, as those of groups whose rewards are all equal.
    It changes no weight: mini-batches, denominators and the number of optimizer steps are those of the whole batch, and
    with KL loss or entropy bonus nothing is left out. No prompts are sampled anew in their place (DAPO). Group
    estimators only."""


class AlgorithmConfig(Section):
    """`algorithm.*`"""

    adv_estimator: Literal["grpo", "gae", "rloo", "reinforce_plus_plus", "opo", "grpo_turn"] = "grpo"
    gamma: float = Field(1.0, ge=0, le=1)
    lam: float = Field(1.0, ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = True
    """False: Dr. GRPO (arXiv:2503.20783)."""
    use_kl_in_reward: bool = False
    kl_penalty: KLType = "kl"
    """Only with use_kl_in_reward."""
    kl_ctrl: KLCtrlConfig = KLCtrlConfig()
    turn_reward_coef: float = Field(1.0, ge=0)
    """Weight of turn rewards (tools, interactions) beside the trajectory's score; 0 leaves them out."""
    filter_groups: FilterGroupsConfig = FilterGroupsConfig()


class RunConfig(Section):
    """`trainer.*` of every training."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    nnodes: int = Field(1, gt=0)
    """Machines of the Ray cluster that the models are sharded over."""
    n_gpus_per_node: int = Field(1, gt=0)
    """Devices of each of them (with device=cpu: processes). With one device in all, nothing but this process is used;
    with more, one Ray actor each."""
    max_worker_restarts: int = Field(0, ge=0)
    """How often a run goes on by itself after a rank died, from its newest checkpoint with new ranks, and as often with
    a new rollout worker after one died; 0: it ends, and the same command goes on. Only with several devices."""
    profile_steps: list[Annotated[int, Field(gt=0)]] | None = None
    """Steps in which the stages of the workers are profiled, e.g. [2,5]; their files are in profile/ of
    default_local_dir."""
    project_name: str = "agentrl"
    """Project in wandb."""
    experiment_name: str = "quickstart"
    """Title of the plot, name of the run in wandb, and folder of the run unless default_local_dir says another."""
    default_local_dir: str = "runs/${trainer.experiment_name}"
    """Where everything the run writes goes. On several nodes: a file system that all of them share."""
    default_remote_dir: str | None = None
    """A folder in an object store, as fsspec names it (s3://bucket/run, gs://..., hdfs://..., file:///...): checkpoints
    and the exported policy are uploaded to it, and a run without them in default_local_dir goes on from there."""
    total_epochs: int = Field(1, gt=0)
    total_training_steps: int | None = Field(None, gt=0)
    """null: as many as total_epochs gives."""
    logger: Loggers = ["console", "jsonl"]
    save_freq: int = -1
    """Checkpoint every so many steps, and at the end; -1: only at the end."""
    test_freq: int = -1
    """Validate every so many steps, and at the end; -1: only at the end."""
    resume_mode: Literal["auto", "disable", "resume_path"] = "auto"
    """auto: go on from the newest checkpoint in default_local_dir, if there is one; disable: start anew, and move what
    is there aside; resume_path: go on from resume_from_path."""
    resume_from_path: str | None = None
    """Only with resume_mode=resume_path."""


class TrainerConfig(RunConfig):
    """`trainer.*`"""

    val_before_train: bool = True
    val_only: bool = False
    """Validate the policy of the checkpoint that is resumed from, or of the start, and train nothing."""
    max_actor_ckpt_to_keep: int | None = Field(2, gt=0)
    critic_warmup: int = Field(0, ge=0)
    """Steps in which only the critic learns; only with a critic."""
    seed: int = Field(1, ge=0)
    """Seed of sampling and of mini-batch order. With the same seed, data and machine a run repeats exactly."""
    save_trajectories: Literal["all", "val", "none"] = "all"
    show_trajectory_freq: int = 10
    """Show one whole trajectory every so many steps; -1: never."""


class RayInitConfig(Section):
    """`ray_init.*`: only with several devices."""

    address: str | None = None
    """A running cluster, e.g. auto or ray://head:10001; null: Ray is started on this machine."""
    num_cpus: int | None = Field(None, gt=0)
    """CPUs of a Ray that is started here; null: all, and at least one a rank."""
    timeline_json_file: str | None = None
    """Where Ray's timeline of the run is written at its end, for chrome://tracing or Perfetto."""


class QuickstartConfig(Section):
    """`quickstart.*`: only when data or model is `quickstart`."""

    dir: str = "runs/quickstart-assets"
    """Where data, tokenizer and warmed-up policy are made; found there, they are used again if made with these keys."""
    seed: int = Field(1, ge=0)
    train_rows: int = Field(2048, gt=0)
    val_rows: int = Field(96, gt=0)


class Config(Section):
    """The whole config of `python -m agentrl.train`."""

    data: DataConfig = DataConfig()
    actor_rollout_ref: ActorRolloutRefConfig = ActorRolloutRefConfig()
    critic: CriticConfig = CriticConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    tools: ToolsConfig = ToolsConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    trainer: TrainerConfig = TrainerConfig()
    ray_init: RayInitConfig = RayInitConfig()
    quickstart: QuickstartConfig = QuickstartConfig()


class SFTDataConfig(Section):
    """`data.*` of `python -m agentrl.sft`."""

    train_files: str | list[str]
    val_files: str | list[str] | None = None
    messages_key: str = "messages"
    tools_key: str = "tools"
    """Column with the tools of a transcript, as OpenAI schemas in JSON text; may be absent."""
    train_batch_size: int = Field(32, gt=0)
    """Transcripts an optimizer step."""
    max_length: int = Field(2048, gt=0)
    truncation: Literal["error", "skip"] = "error"
    """What to do with a longer transcript."""
    max_token_len_per_gpu: int = Field(16384, gt=0)
    """Tokens a micro-batch and rank (with ulysses_sequence_parallel_size, ranks share one); changes memory, never the
    result."""
    shuffle: bool = True
    seed: int = Field(1, ge=0)


class SFTModelConfig(ModelConfig):
    """`model.*` of `python -m agentrl.sft`."""

    fsdp_config: ActorFSDPConfig = ActorFSDPConfig()


class SFTTrainerConfig(RunConfig):
    """`trainer.*` of `python -m agentrl.sft`."""

    experiment_name: str = "sft"
    """Name of the run in wandb, and its folder unless default_local_dir says another."""
    save_freq: int = -1
    """Checkpoint every so many steps, and at the end; -1: never, and the same command starts anew."""
    max_ckpt_to_keep: int | None = Field(2, gt=0)
    """Only with save_freq."""
    checkpoint: CheckpointConfig = CheckpointConfig()


class SFTConfig(Section):
    """The whole config of `python -m agentrl.sft`."""

    data: SFTDataConfig
    model: SFTModelConfig = SFTModelConfig()
    format: str = "auto"
    """As `actor_rollout_ref.rollout.multi_turn.format`."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    grad_clip: float = Field(1.0, gt=0)
    ulysses_sequence_parallel_size: int = Field(1, gt=0)
    """Ranks that split each micro-batch's tokens (arXiv:2309.14509); they exchange them for heads in attention."""
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    ray_init: RayInitConfig = RayInitConfig()

    @property
    def parallel(self) -> Parallel:
        return Parallel.of(self.ulysses_sequence_parallel_size, self.model.fsdp_config)
