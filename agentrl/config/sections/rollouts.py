"""The sections that running trajectories reads, in training and without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

from agentrl.config.rules import OnlyWith
from agentrl.config.section import Finding, Section
from agentrl.config.sections.data import RowsConfig
from agentrl.config.sections.model import PlainModelConfig, PolicyModelConfig
from agentrl.config.sections.reward import CustomRewardConfig, RewardConfig
from agentrl.config.sections.rollout import RolloutConfig
from agentrl.config.sections.tools import ToolsConfig
from agentrl.config.sections.trainer import RAY, RayInitConfig, RolloutsTrainerConfig


class PolicyConfig(Section):
    """`actor_rollout_ref.*`, as far as running trajectories reads it."""

    model: PlainModelConfig = PlainModelConfig()
    rollout: RolloutConfig = RolloutConfig()


class RolloutsConfig(Section):
    """The sections that running trajectories reads."""

    data: RowsConfig = RowsConfig()
    actor_rollout_ref: PolicyConfig = PolicyConfig()
    reward_model: RewardConfig = RewardConfig()
    custom_reward_function: CustomRewardConfig = CustomRewardConfig()
    tools: Annotated[
        ToolsConfig,
        OnlyWith(
            "actor_rollout_ref.rollout.multi_turn.tool_config_path",
            "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
        ),
    ] = ToolsConfig()
    trainer: RolloutsTrainerConfig = RolloutsTrainerConfig()
    ray_init: Annotated[RayInitConfig, RAY] = RayInitConfig()

    @property
    def rollout_workers(self) -> int:
        """Number of processes that run trajectories: with Ray one on each machine that generates."""
        return self.actor_rollout_ref.rollout.nnodes or 1

    @property
    def uses_ray(self) -> bool:
        """Say whether more than this process is asked for."""
        return self.actor_rollout_ref.rollout.nnodes > 0

    @property
    def served_adapters(self) -> PolicyModelConfig | None:
        """Keys of the adapters that servers are sent, and serve unmerged; None where they are merged."""
        return None

    @property
    def frees_weights(self) -> bool:
        """Say whether a server's weights are freed during an update. Weights that later updates build on are kept."""
        rollout = self.actor_rollout_ref.rollout
        return rollout.free_cache_engine and not rollout.update_weights_delta and self.served_adapters is None

    def findings(self) -> Iterator[Finding]:
        rollout, workers = self.actor_rollout_ref.rollout, self.rollout_workers
        needed = self.data.max_prompt_length + self.data.max_response_length
        if rollout.max_model_len is not None and rollout.max_model_len < needed:
            yield Finding(
                f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is less than data.max_prompt_length "
                f"+ data.max_response_length = {self.data.max_prompt_length} + {self.data.max_response_length} = "
                f"{needed}; raise it, or set it to null"
            )
        if rollout.server_urls is not None and len(rollout.server_urls) < workers:
            yield Finding(
                f"actor_rollout_ref.rollout.server_urls has {len(rollout.server_urls)} servers for {workers} rollout "
                "workers, of which each needs one at least. Set actor_rollout_ref.rollout.nnodes=1, or name more "
                "servers"
            )
        if self.tools.cassette is not None and workers > 1:
            yield Finding(f"tools.cassette={self.tools.cassette} is one file, and there are {workers} rollout workers")
        if rollout.frozen_adapters and self.served_adapters is None:
            yield Finding(
                f"actor_rollout_ref.rollout.roles: {', '.join(rollout.frozen_adapters)}: adapters are served next to "
                "the policy's own, in a training with actor_rollout_ref.model.lora_rank and lora_merge=false. Set "
                "these, or serve the model and set base_url"
            )
        yield from self._overlong()

    def _overlong(self) -> Iterator[Finding]:
        """Check that the penalty for overlong responses begins before their limit, which is not above the hard one."""
        buffer, hard = self.reward_model.overlong_buffer, self.data.max_response_length
        limit = buffer.max_resp_len or hard
        if not buffer.enable or buffer.len is None:
            return
        if limit > hard:
            yield Finding(
                f"reward_model.overlong_buffer.max_resp_len={limit} is above data.max_response_length={hard}, which no "
                "response passes: leave it out"
            )
        if buffer.len > limit:
            yield Finding(
                f"reward_model.overlong_buffer.len={buffer.len} is more than the {limit} tokens that a response may "
                "have (max_resp_len, or data.max_response_length): lower it"
            )
