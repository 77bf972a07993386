"""The whole configs of `python -m agentrl.sft` and, in the same keys but for a few, `python -m agentrl.preferences`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.declaration import Rows, declaration_of
from agentrl.config.registries import PAIR_LOSSES, ROW_FORMATS, UNPAIRED_LOSSES
from agentrl.config.rules import Names, OnlyWith, ReadBy
from agentrl.config.section import Finding, Section
from agentrl.config.sections.checks import UpdateChecksConfig
from agentrl.config.sections.model import ModelConfig, ReadyModel
from agentrl.config.sections.optim import OptimConfig
from agentrl.config.sections.parallel import RANKS, ActorFSDPConfig, Parallel
from agentrl.config.sections.rollout import NAMES_FORMAT
from agentrl.config.sections.trainer import RAY, CheckpointConfig, RayInitConfig, RunConfig

SAVED = OnlyWith("save_freq above 0", "metric_for_best_model")


class TuningDataConfig(Section):
    """`data.*` of what learns from transcripts in files."""

    train_files: str | list[str]
    """Parquet files, JSON lines, folders, glob patterns or Hugging Face data sets (hf:owner/name:split; see
    docs/data.md)."""
    val_files: str | list[str] | None = None
    """The same for validation; null: no validation."""
    tools_key: str = "tools"
    """Column with the tools of a transcript, as a list of OpenAI schemas or in JSON text; may be absent."""
    train_batch_size: int = Field(32, gt=0)
    """Rows an optimizer step: transcripts, pairs, or conversations that are good or bad by themselves."""
    max_length: int = Field(2048, gt=0)
    """Tokens of a transcript."""
    truncation: Literal["error", "skip"] = "error"
    """Action for a longer transcript."""
    on_bad_row: Literal["error", "skip", "learn"] = "error"
    """Action for a row that cannot be learnt, or would teach something wrong: stop and name it, or skip and count it.
    learn: learn broken calls and empty turns, too, where the data are meant to teach mistakes."""
    max_token_len_per_gpu: int = Field(16384, gt=0)
    """Tokens a micro-batch and rank (with ulysses_sequence_parallel_size, ranks share one); changes memory, never the
    result."""
    shuffle: bool = True
    """Draw the rows in a shuffled order; false: as in the files."""
    seed: int = Field(1, ge=0)
    """Seed of the data order."""


USED = OnlyWith("feedback=filter or weight or exp_weight")


class SFTDataConfig(TuningDataConfig):
    """`data.*` of `python -m agentrl.sft`."""

    row_format: Annotated[str, Names(ROW_FORMATS)] = "auto"
    """Form of the rows (docs/data.md#columns-of-supervised-training). auto: by the columns of each file, or messages
    where messages_key names another column."""
    messages_key: str = "messages"
    """Column with the messages of a transcript, as a list or in JSON text."""
    feedback_key: str | None = None
    """Column with what somebody thought of a transcript: a number, true or false, or a word such as up or down
    (docs/sft.md#learn-from-feedback). null: the column feedback, where a file has it."""
    feedback: Literal["ignore", "filter", "weight", "exp_weight"] | None = None
    """Use of the feedback. filter: only transcripts above feedback_threshold are learnt; weight: each transcript's loss
    counts so many times; exp_weight: exp(feedback / feedback_temperature) times. Weights are relative to their mean by
    token over the files. null: as ignore, and the run says at its start what it does not use."""
    feedback_threshold: Annotated[float, OnlyWith("feedback=filter")] = 0.0
    """Transcripts whose feedback is not above it are left out."""
    feedback_temperature: Annotated[float, OnlyWith("feedback=exp_weight")] = Field(1.0, gt=0)
    """Difference of feedback that makes a weight e times as large."""
    without_feedback: Annotated[Literal["keep", "skip"], USED] = "keep"
    """Transcripts without feedback. keep: they are learnt, with weight 1; skip: they are left out."""


OF_UNPAIRED = ReadBy([PAIR_LOSSES], "loss=kto or apo_zero_unpaired", declares=lambda found: found.rows != "pairs")


class PairDataConfig(TuningDataConfig):
    """`data.*` of `python -m agentrl.preferences`."""

    row_format: Annotated[str, Names(ROW_FORMATS), OF_UNPAIRED] = "auto"
    """Same as for supervised training, of conversations that are good or bad by themselves."""
    messages_key: Annotated[str, OF_UNPAIRED] = "messages"
    """Column with their messages, as a list or in JSON text."""
    feedback_key: Annotated[str | None, OF_UNPAIRED] = None
    """Column that says what somebody thought of a conversation: a number, true or false, or a word such as up or down.
    null: the column feedback, or TRL's label."""
    feedback_threshold: Annotated[float, OF_UNPAIRED] = 0.0
    """Conversations are good whose feedback is above it, and bad the others. Without feedback, rows are left out."""
    chosen_key: str = "chosen"
    """Column with the messages of the preferred conversation, as a list or in JSON text."""
    rejected_key: str = "rejected"
    """Column with the messages of the other one."""
    prompt_key: str | Literal[False] | None = None
    """Column with the messages, or the text, that both begin with. null: the column prompt where the files have it;
    false: chosen and rejected are whole conversations."""


class SFTModelConfig(ModelConfig):
    """`model.*` of `python -m agentrl.sft` and `agentrl.preferences`."""

    path: ReadyModel
    """A Hugging Face model directory or name, e.g. runs/quickstart/policy, which `python -m agentrl.train` leaves."""
    fsdp_config: ActorFSDPConfig = ActorFSDPConfig()


class SFTTrainerConfig(RunConfig):
    """`trainer.*` of `python -m agentrl.sft` and `agentrl.preferences`."""

    experiment_name: str = "sft"
    """Name of the run in wandb, and its folder unless default_local_dir says another."""
    save_freq: int = -1
    """Checkpoint every so many steps, and at the end; -1: never (but see metric_for_best_model), and the same command
    starts anew."""
    max_ckpt_to_keep: Annotated[int | None, SAVED] = Field(2, gt=0)
    """Checkpoints that are kept, newest first; null: all."""
    checkpoint: Annotated[CheckpointConfig, SAVED] = CheckpointConfig()
    checks: UpdateChecksConfig = UpdateChecksConfig()


class PreferencesTrainerConfig(SFTTrainerConfig):
    """`trainer.*` of `python -m agentrl.preferences`."""

    experiment_name: str = "preferences"
    """Name of the run in wandb, and its folder unless default_local_dir says another."""


class TuningConfig(Section):
    """The keys that `python -m agentrl.sft` and `agentrl.preferences` have in common."""

    data: TuningDataConfig
    model: SFTModelConfig
    format: Annotated[str, NAMES_FORMAT] = "auto"
    """Same as `actor_rollout_ref.rollout.multi_turn.format`."""
    optim: OptimConfig = OptimConfig(lr=1e-5)
    grad_clip: float = Field(1.0, gt=0)
    """Largest norm of the gradient; a larger one is scaled down."""
    ulysses_sequence_parallel_size: Annotated[int, RANKS] = Field(1, gt=0)
    """Ranks that split each micro-batch's tokens (arXiv:2309.14509); they exchange them for heads in attention."""
    trainer: SFTTrainerConfig = SFTTrainerConfig()
    ray_init: Annotated[RayInitConfig, RAY] = RayInitConfig()

    def findings(self) -> Iterator[Finding]:
        ranks = self.trainer.nnodes * self.trainer.n_gpus_per_node
        yield from map(Finding, self.parallel.faults(ranks, "", "model.fsdp_config"))

    @property
    def parallel(self) -> Parallel:
        """Arrangement of the ranks."""
        return Parallel.from_fsdp(self.ulysses_sequence_parallel_size, self.model.fsdp_config)

    @property
    def uses_ray(self) -> bool:
        """Say whether more than this process is asked for."""
        return self.trainer.nnodes * self.trainer.n_gpus_per_node > 1


class SFTConfig(TuningConfig):
    """The whole config of `python -m agentrl.sft`."""

    data: SFTDataConfig
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    """Same as `actor_rollout_ref.actor.strategy_options`, of fsdp2."""


OF_POLICY = OnlyWith("trains=policy", because="a reward model has the Bradley-Terry loss")


class PreferencesConfig(TuningConfig):
    """The whole config of `python -m agentrl.preferences`."""

    data: PairDataConfig
    trains: Literal["policy", "reward_model"] = "policy"
    """policy: by `loss`, against the model that it starts from; reward_model: a head on model.path that scores whole
    conversations, by the Bradley-Terry loss -log sigmoid(score(chosen) - score(rejected)), for reward_model.model.path
    of a training."""
    optim: OptimConfig = OptimConfig(lr=1e-6)
    loss: Annotated[str, Names(PAIR_LOSSES, options="loss_options"), OF_POLICY] = "sigmoid"
    """Loss of a pair: sigmoid or dpo: DPO (arXiv:2305.18290); ipo (arXiv:2310.12036); sppo (arXiv:2405.00675). Loss of
    a conversation that is good or bad by itself: kto (arXiv:2402.01306); apo_zero_unpaired (arXiv:2408.06266)."""
    loss_options: Annotated[dict[str, Any], OF_POLICY] = Field(default_factory=dict)
    """Its options: beta (0.1; sppo 0.001), label_smoothing (sigmoid: 0), desirable_weight and undesirable_weight (kto
    and apo_zero_unpaired: 1), or those of one of yours."""
    trainer: PreferencesTrainerConfig = PreferencesTrainerConfig()

    def findings(self) -> Iterator[Finding]:
        yield from super().findings()
        size = self.data.train_batch_size
        if size < 2 and UNPAIRED_LOSSES.get(self.loss) == "mismatched":
            yield Finding(
                f"data.train_batch_size={size}: {self.loss} needs 2 or more, as it compares with the policy's "
                "log-probs of other rows' answers of the batch",
                key="data.train_batch_size",
            )

    @property
    def rows(self) -> Rows:
        """The rows that the loss learns from. Imports a loss of the user's, and no other."""
        if self.trains == "reward_model":
            return "pairs"
        if PAIR_LOSSES.is_built_in(self.loss):
            return UNPAIRED_LOSSES.get(self.loss, "pairs")
        return declaration_of(PAIR_LOSSES.get(self.loss)).rows
