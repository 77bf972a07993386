"""Keys of the policy's model."""

from __future__ import annotations

from datetime import date
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from agentrl.config.rules import ConflictsWith, NamesFile, OnlyWith, Uses
from agentrl.config.section import Section
from agentrl.config.sections.parallel import DEVICE

JINJA = ("{%", "{{")
TODAY = "today"
WITH_LORA = OnlyWith("lora_rank above 0")


def no_quickstart(path: str) -> str:
    """Refuse the policy that training makes for itself. Raises ValueError."""
    if path == "quickstart":
        raise ValueError("a model that is there")
    return path


def written_date(text: str) -> str:
    """Check a date as ISO 8601 writes it, or `today`. Raises ValueError."""
    try:
        return text if text == TODAY else date.fromisoformat(text).isoformat()
    except ValueError:
        raise ValueError(f"a date as 2026-11-30, or {TODAY}") from None


ReadyModel = Annotated[str, AfterValidator(no_quickstart)]


class PlainModelConfig(Section):
    """`actor_rollout_ref.model.*`, as far as running trajectories reads it."""

    path: str = "quickstart"
    """A Hugging Face model directory or name; `quickstart` makes and warms up the tiny policy first."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Parameter type of policy, reference and engine."""
    trust_remote_code: Annotated[bool, Uses("code")] = False
    """Run Python code that lies with the model."""
    override_config: dict[str, Any] = Field(default_factory=dict)
    """Values in place of those in the model's config.json, for policy, reference and engine, sections merged; exported
    with the policy. E.g. {rope_scaling: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}}."""
    chat_template: Annotated[str | None, NamesFile(unless=JINJA)] = None
    """A Jinja file that replaces the tokenizer's chat template, or the template itself."""
    chat_template_date: Annotated[str, AfterValidator(written_date)] | None = None
    """The date that templates with `strftime_now` write (Llama 3, gpt-oss, SmolLM3), as 2026-11-30; null: the day on
    which the run began, also where it resumes; today: the day of each prompt. The family llama-3 writes 26 Jul 2024,
    or chat_template_kwargs.date_string."""
    chat_template_kwargs: Annotated[
        dict[str, Any],
        ConflictsWith(
            "trains=reward_model",
            why="where it scores, its template is given messages alone. Set what it needs in a template, as "
            "model.chat_template",
        ),
    ] = Field(default_factory=dict)
    """Further variables for the chat template or renderer, e.g. enable_thinking."""


class ModelConfig(PlainModelConfig):
    """`actor_rollout_ref.model.*`"""

    enable_gradient_checkpointing: Literal["auto"] | bool | Annotated[int, Field(ge=2)] = "auto"
    """Keep only the input of a decoder layer for the backward pass, and compute the layer again: of every layer (true),
    of none (false), or of so many, the first ones. auto: on a GPU as few as fit by the plan of memory (docs/scale.md),
    on a CPU none."""
    enable_activation_offload: Annotated[bool, OnlyWith("enable_gradient_checkpointing=true"), DEVICE] = False
    """Keep these inputs in host memory."""
    lora_rank: Annotated[
        int,
        ConflictsWith(
            "actor.fsdp_config.tensor_parallel_size above 1",
            "fsdp_config.tensor_parallel_size above 1",
            of="above 0",
            why="adapters are not split. Use fsdp_size and ulysses_sequence_parallel_size",
        ),
        ConflictsWith("trains=reward_model", of="above 0", why="it trains the whole model. Leave lora_rank out"),
    ] = Field(0, ge=0)
    """Rank of LoRA's adapters (arXiv:2106.09685), which are then all that is trained; 0: no adapters."""
    lora_alpha: Annotated[int, WITH_LORA] = Field(16, gt=0)
    """Adapters are scaled by lora_alpha / lora_rank."""
    target_modules: Annotated[Literal["all-linear"] | Annotated[list[str], Field(min_length=1)], WITH_LORA] = (
        "all-linear"
    )
    """Linear layers that get adapters, e.g. [q_proj,v_proj]; all-linear: all but the head; in a
    mixture of experts neither router nor experts."""
    exclude_modules: Annotated[str | list[str] | None, WITH_LORA] = None
    """Layers that get none though target_modules names them: names, or a regular expression of whole names."""
    lora_adapter_path: Annotated[str | None, WITH_LORA] = None
    """A folder of adapters in peft's format to start from; null: adapters that change nothing yet."""

    def recomputed(self, layers: int) -> int:
        """Count the decoder layers, of so many, that the backward pass computes again.

        With auto none, until the plan has chosen (`agentrl.plan.choices`).
        """
        found = self.enable_gradient_checkpointing
        if isinstance(found, bool):
            return layers if found else 0
        return 0 if found == "auto" else min(found, layers)


class PolicyModelConfig(ModelConfig):
    """`actor_rollout_ref.model.*` of `python -m agentrl.train`."""

    lora_merge: Annotated[bool, WITH_LORA] = True
    """Merge adapters into the weights that the engine gets. false: it gets the base once and the adapters after each
    step, and serves them unmerged, as servers of SGLang and vLLM can (docs/engines.md)."""
