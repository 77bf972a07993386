"""Keys of the jobs without training: `python -m agentrl.generate` and `python -m agentrl.evaluate`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from agentrl.config.rules import ConflictsWith, Uses, Writes
from agentrl.config.section import Section
from agentrl.config.sections.data import RowsConfig
from agentrl.config.sections.model import PlainModelConfig, ReadyModel
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.config.sections.rollout import RolloutConfig
from agentrl.config.sections.rollouts import PolicyConfig, RolloutsConfig
from agentrl.config.sections.trainer import OWN_CLUSTER
from agentrl.config.sections.training import Config


class GenerateDataConfig(RowsConfig):
    """`data.*` of `python -m agentrl.generate`."""

    path: str | list[str]
    """Parquet files or glob patterns with the prompts."""
    output_path: Annotated[str, Writes()]
    """The parquet file that is written: the columns of the rows, and the responses. It must not exist."""
    batch_size: int = Field(256, gt=0)
    """Prompts that run at once, and that are lost at most when the run is killed."""
    max_samples: int | None = Field(None, gt=0)
    """Use only the first so many rows."""
    output_scores: bool = False
    """Score every response as training does, into the column response_score."""
    output_trajectories: bool = False
    """Write the whole record of every response, as a run's trajectories/ have it: messages, turns, tool calls, token
    ids, mask, log-probs."""


class GenerateModelConfig(PlainModelConfig):
    """`actor_rollout_ref.model.*` of `python -m agentrl.generate`."""

    path: ReadyModel
    """A Hugging Face model directory or name, e.g. runs/quickstart/policy, which `python -m agentrl.train` leaves."""
    lora_adapter_path: None = None
    """A whole model is wanted: name one with its adapters merged, as runs write it into policy/, and set this key to
    null."""


class GenerateRolloutConfig(RolloutConfig):
    """`actor_rollout_ref.rollout.*` of `python -m agentrl.generate`."""

    do_sample: Annotated[
        bool,
        ConflictsWith("n above 1", of="false", why="greedily every response of a prompt is the same. Set rollout.n=1"),
    ] = True
    """False: greedily."""


class GeneratePolicyConfig(PolicyConfig):
    """`actor_rollout_ref.*` of `python -m agentrl.generate`."""

    model: GenerateModelConfig
    rollout: GenerateRolloutConfig = GenerateRolloutConfig()


class GenerateConfig(RolloutsConfig):
    """The whole config of `python -m agentrl.generate`.

    The YAML of a training run, its config.yaml included, serves here too: keys that only training reads are ignored.
    """

    short_keys: ClassVar[Mapping[str, str]] = {
        "model.": "actor_rollout_ref.model.",
        "rollout.": "actor_rollout_ref.rollout.",
        "data.n_samples": "actor_rollout_ref.rollout.n",
    }
    ignored: ClassVar[type[Section] | None] = Config
    data: GenerateDataConfig
    actor_rollout_ref: GeneratePolicyConfig


class EvaluateDataConfig(Section):
    """`data.*` of `python -m agentrl.evaluate`."""

    path: str | list[str]
    """Parquet files, JSON lines, folders, glob patterns or Hugging Face data sets (docs/data.md), one row a prompt; or
    a run's folder, whose recorded trajectories are scored again (docs/evaluate.md)."""
    steps: list[int] | str | None = None
    """Steps of a run's folder: a list such as [10,20], or a range from A up to B without B, such as 10:20, 10: or :20.
    null: all that are recorded."""
    split: Literal["train", "val"] = "train"
    """Trajectories of a run's folder that are scored: those of training, or those of validation."""
    prompt_key: str = "prompt"
    """The column that holds the messages; it may be absent."""
    response_key: str = "responses"
    """The column that holds a row's responses: a list of texts, or one text. A null counts as a failure."""
    data_source_key: str = "data_source"
    """The column that says which scorer judges the row; with a function of your own it may be absent."""
    reward_model_key: str = "reward_model"
    """The column with ground_truth; with a function of your own it may be absent."""
    output_path: Annotated[str | None, Writes()] = None
    """A JSON file for the numbers of the table."""
    scores_path: Annotated[str | None, Writes()] = None
    """A parquet file for the score of each response, next to its earlier score. It must not exist. A command that was
    killed continues where it stopped, and asks no scorer twice."""
    on_code_error: Literal["error", "count"] = "error"
    """Action when a function of your own raises what is no fault of the infrastructure, or gives what is no score:
    stop and name file, line and row, or count the response as a failure."""


class EvaluateRayConfig(Section):
    """`ray_init.*` of `python -m agentrl.evaluate`: with one of them the scorers run in Ray's processes."""

    address: Annotated[str | None, Uses("a host")] = None
    """A running cluster, e.g. auto or ray://head:10001."""
    num_cpus: Annotated[int | None, OWN_CLUSTER] = Field(None, gt=0)
    """Start Ray on this machine with so many processes."""


class EvaluateConfig(Section):
    """The whole config of `python -m agentrl.evaluate`."""

    data: EvaluateDataConfig
    reward_model: RewardConfig = RewardConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    ray_init: EvaluateRayConfig = EvaluateRayConfig()
