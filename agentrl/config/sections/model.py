"""Keys of the policy's model."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from agentrl.config.section import Section


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
