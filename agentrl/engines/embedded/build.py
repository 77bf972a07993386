"""The embedded engine from the config."""

from __future__ import annotations

from agentrl.config.sections.training import Config
from agentrl.engines.builder import EngineSetting
from agentrl.engines.embedded.engine import EmbeddedEngine
from agentrl.engines.embedded.shapes import check_copy
from agentrl.model.download import download_weights
from agentrl.model.packed import load_model
from agentrl.model.trial import try_family
from agentrl.system.loop_thread import LoopThread


def build(setting: EngineSetting, loop: LoopThread) -> EmbeddedEngine:
    """Load the policy's model into this process. See `EngineBuilder`."""
    config = setting.config
    model, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    if not isinstance(config, Config):  # A training has done so before it loaded the policy.
        try_family(model.path, model.override_config, trust_remote_code=model.trust_remote_code, further=check_copy)
        download_weights(model.path, setting.reporter)
    with setting.reporter.stage("load engine"):
        return EmbeddedEngine(
            load_model(
                model.path,
                dtype=model.dtype,
                device=setting.device,
                trust_remote_code=model.trust_remote_code,
                override=model.override_config,
            ),
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=setting.max_model_len,
            stop_decode=setting.decode,
            graphs=rollout.engine_kwargs.embedded.paged,
            records_experts=isinstance(config, Config) and config.actor_rollout_ref.actor.router_replay.of_engine,
        )
