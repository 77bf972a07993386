"""Keys of a run: `trainer.*`, `ray_init.*`, `quickstart.*`, `*.checkpoint.*`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from agentrl.config.registries import ADVANTAGE_ESTIMATORS, CHECKPOINT_WRITERS, LOGGERS, STEP_OBSERVERS
from agentrl.config.rules import ConflictsWith, Names, NamesEach, Needs, OnlyWith, ReadBy, Uses, Writes
from agentrl.config.section import Section
from agentrl.config.sections.checks import ChecksConfig

ONE_OR_MORE = BeforeValidator(lambda value: [value] if isinstance(value, str) else value)


RAY = OnlyWith(
    "trainer.nnodes above 1",
    "trainer.n_gpus_per_node above 1",
    "actor_rollout_ref.rollout.nnodes above 0",
    "reward_model.enable_resource_pool=true",
)
SAVED = OnlyWith("save_trajectories=all or val", "save_trajectories above 0")
OWN_CLUSTER = ConflictsWith("address", why="a cluster that runs has its CPUs already. Set one of them to null")


class CheckpointConfig(Section):
    """`*.checkpoint.*`: keys of the run's checkpoints, which hold the critic, too."""

    async_save: bool = False
    """Go on with the next step when the weights are copied to host memory, and write them meanwhile."""
    writer: Annotated[str, Names(CHECKPOINT_WRITERS)] = "safetensors"
    """Writes and reads weights and optimizer state. safetensors: a file of each rank, which any number of ranks reads.
    One of yours is a class with the methods of `StateWriter` (docs/extending.md). A checkpoint is read by the writer
    that wrote it. It is for the strategies of agentrl; others write their own files."""

    @property
    def fingerprint(self) -> dict[str, str]:
        """Return what the fingerprint of a checkpoint says of its writer; nothing of the default."""
        return {} if self.writer == "safetensors" else {"checkpoint.writer": self.writer}


class BudgetConfig(Section):
    """`trainer.budget.*`: the run ends when one more step would not fit, as after its last step."""

    minutes: float | None = Field(None, gt=0)
    """Minutes that the run's processes may take, from their start, killed ones up to their last step. The last
    validation and the export come on top."""
    tokens: int | None = Field(None, gt=0)
    """Tokens of the batches that are trained on, prompts included; perf/tokens_per_second counts the same."""
    cost: Annotated[float | None, Needs("price_per_hour", "the price of an hour of all machines")] = Field(None, gt=0)
    """Money that the minutes may cost, in the currency of price_per_hour."""
    price_per_hour: float | None = Field(None, gt=0)
    """Price of an hour of all machines of the run; budget/cost is logged by it."""


Device = Literal["auto", "cpu", "cuda"]


class JobConfig(Section):
    """`trainer.*` of everything that runs a model."""

    device: Device = "auto"
    """auto: cuda where there is a GPU, else cpu."""
    max_worker_restarts: Annotated[int, RAY] = Field(0, ge=0)
    """How often a run goes on by itself after a rank died, from its newest checkpoint with new ranks, and as often with
    a new rollout worker after one died; 0: it ends, and the same command goes on."""
    project_name: str = "agentrl"
    """Project in wandb; with experiment_name the name by which servers know the run."""
    experiment_name: str = "quickstart"
    """Title of the plot, name of the run in wandb, and folder of the run unless default_local_dir says another."""


class RolloutsTrainerConfig(JobConfig):
    """`trainer.*`, as far as running trajectories reads it."""

    seed: int = Field(1, ge=0)
    """Seed of sampling and of mini-batch order. With the same seed, data and machine a run repeats exactly."""


class RunConfig(JobConfig):
    """`trainer.*` of every training."""

    nnodes: int = Field(1, gt=0)
    """Machines of the Ray cluster that the models are sharded over."""
    n_gpus_per_node: int = Field(1, gt=0)
    """Devices of each of them (with device=cpu: processes). With one device in all, nothing but this process is used;
    with more, one Ray actor each."""
    show_verl_notes: bool = False
    """List at the start every key of verl's that has no effect here, with the reason; false: only their number."""
    profile_steps: list[Annotated[int, Field(gt=0)]] | None = None
    """Steps in which the stages of the workers are profiled, e.g. [2,5]; their files are in profile/ of
    default_local_dir."""
    default_local_dir: Annotated[str, Writes()] = "runs/${trainer.experiment_name}"
    """Folder of everything the run writes. On several nodes: a file system that all of them share."""
    default_remote_dir: Annotated[str | None, Uses("a host")] = None
    """A folder in an object store, as fsspec names it (s3://bucket/run, gs://..., hdfs://..., file:///...): checkpoints
    and the exported policy are uploaded to it, and a run without them in default_local_dir goes on from there."""
    total_epochs: int = Field(1, gt=0)
    """Passes over the training data, where total_training_steps does not say how many steps are taken."""
    total_training_steps: int | None = Field(None, gt=0)
    """Steps of the run, whatever total_epochs is; null: as many as total_epochs gives."""
    logger: Annotated[list[str], ONE_OR_MORE, NamesEach(LOGGERS, options="logger_options")] = ["console", "jsonl"]
    """Destinations of each step's metrics; a class of your own is a subclass of agentrl.observe.tracking.Sink."""
    logger_options: Annotated[dict[str, dict[str, Any]], Uses("values of loggers, e.g. hosts")] = Field(
        default_factory=dict
    )
    """Options of loggers, by their entries in logger; e.g. wandb: {entity: team, group: a, tags: [b]}."""
    save_freq: int = -1
    """Checkpoint every so many steps, and at the end; -1: only at the end."""
    metric_for_best_model: str | None = None
    """A metric, such as val/loss: whenever its value is better than at all steps before, that step's checkpoint is
    saved, and kept beside the newest ones until another is better. null: none."""
    greater_is_better: Annotated[bool | None, OnlyWith("metric_for_best_model")] = None
    """The better value of metric_for_best_model is the greater one; null: unless its name ends in loss."""
    early_stopping_patience: Annotated[int | None, OnlyWith("metric_for_best_model")] = Field(None, gt=0)
    """End the run when metric_for_best_model was measured so many times without a better value; null: train on."""
    load_best_model_at_end: Annotated[bool, OnlyWith("metric_for_best_model")] = False
    """Export the best step's policy at the end; false: the last step's."""
    budget: BudgetConfig = BudgetConfig()
    test_freq: Annotated[int, OnlyWith("data.val_files")] = -1
    """Validate every so many steps, and after the last one; -1: never between the first and the last."""
    val_before_train: Annotated[bool, OnlyWith("data.val_files")] = False
    """Validate before the first step, too."""
    val_after_train: Annotated[bool, OnlyWith("data.val_files")] = True
    """Validate after the last step where test_freq is -1, too."""
    resume_mode: Annotated[
        Literal["auto", "disable", "resume_path"],
        Needs("resume_from_path", "the checkpoint's folder", of="resume_path"),
    ] = "auto"
    """auto: go on from the newest checkpoint in default_local_dir, if there is one; disable: start anew, and move what
    is there aside; resume_path: go on from resume_from_path."""
    resume_from_path: Annotated[str | None, OnlyWith("resume_mode=resume_path")] = None
    """A checkpoint, e.g. runs/mine/checkpoints/step_000012."""


class TrainerConfig(RunConfig, RolloutsTrainerConfig):
    """`trainer.*` of reinforcement learning."""

    verl_metric_names: bool = False
    """Log those metrics that verl has, too, under its names beside ours, for dashboards that are there already."""
    val_before_train: bool = True
    """Validate before the first step, too."""
    preemption_seconds: float = Field(20, ge=0)
    """Seconds that a run which is sent SIGTERM takes at most to end an update that has begun and to save a checkpoint
    of the last whole step; less than your scheduler gives before it kills. 0: no checkpoint. The exit status is 143."""
    val_only: Annotated[bool, Needs("data.val_files")] = False
    """Validate the policy of the checkpoint that is resumed from, or of the start, and train nothing. What it writes is
    in val_only/ of default_local_dir."""
    max_actor_ckpt_to_keep: int | None = Field(2, gt=0)
    """Checkpoints that are kept, newest first; null: all."""
    critic_warmup: Annotated[
        int,
        ReadBy(
            (ADVANTAGE_ESTIMATORS,),
            "algorithm.adv_estimator=gae or bi_level_gae or decoupled_gae",
            declares=lambda declared: "values" in declared.columns,
        ),
    ] = Field(0, ge=0)
    """Steps in which only the critic learns."""
    save_trajectories: (
        Literal["all", "val", "none"] | Annotated[int, Field(gt=0)] | Annotated[float, Field(gt=0, lt=1)]
    ) = "all"
    """Trajectories that are written to trajectories/, and of those that are trained on also what the update made of
    their tokens: all; those of validation; none; or, beside those of validation, of each step a number such as 64, or a
    share such as 0.1, both rounded up to whole prompts, drawn by step."""
    trajectories_to_keep_gb: Annotated[float | None, SAVED] = Field(50.0, gt=0)
    """Size of trajectories/, in 10^9 bytes, from which on the oldest training steps are removed from it; those of
    validation, of the newest step and of steps with a checkpoint stay. null: none is removed."""
    checks: ChecksConfig = ChecksConfig()
    """Checks of every step."""
    show_trajectory_freq: int = 10
    """Show one whole trajectory every so many steps; -1: never."""
    log_val_generations: Annotated[
        int,
        OnlyWith("data.val_files"),
        OnlyWith("save_trajectories=all or val", "save_trajectories above 0", because="they are read from there"),
    ] = Field(0, ge=0)
    """So many prompts and responses of each validation, with their scores, go to the loggers as a table: a file in
    val_generations/ with jsonl, a table with wandb, mlflow, swanlab and trackio, text with tensorboard."""
    rollout_data_dir: Annotated[
        str | None,
        Writes(),
        OnlyWith("save_trajectories=all", "save_trajectories above 0", because="it is made from what that writes"),
    ] = None
    """Folder to which prompts, responses, rewards and the scorers' numbers of each training step are written as text:
    STEP.jsonl. Everything else about them is in trajectories/."""
    validation_data_dir: Annotated[
        str | None,
        Writes(),
        OnlyWith(
            "save_trajectories=all or val", "save_trajectories above 0", because="it is made from what that writes"
        ),
    ] = None
    """The same for each validation."""
    observers: Annotated[list[str], ONE_OR_MORE, NamesEach(STEP_OBSERVERS, options="observer_options")] = []
    """Observers of each training step: subclasses of agentrl.trainer.observer.StepObserver, called in this order, after
    agentrl's own. An error of one ends the run."""
    observer_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of observers, by their entries in observers."""


class RuntimeEnvConfig(Section):
    """`ray_init.runtime_env.*`"""

    env_vars: Annotated[dict[str, str], Uses("environment variables of processes")] = Field(default_factory=dict)
    """Environment variables of ranks and rollout workers, on every machine, e.g. {NCCL_DEBUG: INFO}."""


class RayInitConfig(Section):
    """`ray_init.*`"""

    address: Annotated[str | None, Uses("a host")] = None
    """A running cluster, e.g. auto or ray://head:10001; null: Ray is started on this machine."""
    num_cpus: Annotated[int | None, OWN_CLUSTER] = Field(None, gt=0)
    """CPUs of a Ray that is started here; null: all, and at least one a rank."""
    include_dashboard: Annotated[
        bool, ConflictsWith("address", why="a cluster that runs has its dashboard, or none. Set one of them to null")
    ] = False
    """Start Ray's dashboard, on port 8265 of this machine; it needs pip install 'ray[default]'."""
    runtime_env: RuntimeEnvConfig = RuntimeEnvConfig()
    timeline_json_file: Annotated[str | None, Writes()] = None
    """File for Ray's timeline of the run, written at its end, for chrome://tracing or Perfetto."""


class QuickstartConfig(Section):
    """`quickstart.*`"""

    dir: Annotated[str, Writes()] = "runs/quickstart-assets"
    """Folder in which data, tokenizer and warmed-up policy are made; found there, they are used again
    if made with these keys."""
    seed: int = Field(1, ge=0)
    """Seed of data and policy."""
    train_rows: int = Field(2048, gt=0)
    """Rows of the training data."""
    val_rows: int = Field(96, gt=0)
    """Rows of the validation data."""
