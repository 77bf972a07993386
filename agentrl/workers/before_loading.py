"""Checks of a run's models from their configs alone, before the first weight is read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentrl.algorithms.declared import needs_reference
from agentrl.config import Config, TuningConfig
from agentrl.engines.embedded.shapes import check_copy
from agentrl.model.compiled import not_compiled
from agentrl.model.download import download_weights
from agentrl.model.heads import check_options
from agentrl.model.trial import keeps_states, try_family
from agentrl.system.json_value import JSON
from agentrl.system.reporter import Reporter


def check_models(config: Config, device: str) -> None:
    """Check every model that a run of RL loads. Raises ConfigError with the key to change."""
    roles = config.actor_rollout_ref
    model, actor, rollout = roles.model, roles.actor, roles.rollout
    if rollout.name == "sglang" and rollout.server_urls is None:
        from agentrl.engines.sglang.build import check_family

        check_family(model, device)
    further = check_copy if rollout.name == "embedded" else None
    for path, override, trust in (
        (model.path, model.override_config, model.trust_remote_code),
        *_frozen(config),
    ):
        if actor.compiles and keeps_states(path, override, trust_remote_code=trust):
            raise not_compiled(path)
        try_family(path, override, trust_remote_code=trust, further=further if path == model.path else None)
    losses = (actor.strategy_options.get(name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff"))
    follows = actor.router_replay.mode != "disabled" or any(losses)
    check_options(model, freeze_vision_tower=actor.freeze_vision_tower, follows_routes=follows)


def check_tuned(config: TuningConfig) -> None:
    """Check the model of a training on files, likewise."""
    model = config.model
    try_family(model.path, model.override_config, trust_remote_code=model.trust_remote_code)
    check_options(model)


def download_models(config: Config, reporter: Reporter) -> None:
    """Download the weights that a run of RL reads from the hub. Ranks on several machines each download their own."""
    if config.trainer.nnodes == 1:
        for path in dict.fromkeys([config.actor_rollout_ref.model.path, *(path for path, _, _ in _frozen(config))]):
            download_weights(path, reporter)


def _frozen(config: Config) -> Iterator[tuple[str, Mapping[str, JSON], bool]]:
    """Find the models that do not learn: path, values in place of its config's, and whether its own code runs."""
    roles, scoring = config.actor_rollout_ref, config.reward_model
    if roles.ref.path not in (None, roles.model.path) and needs_reference(config):
        yield roles.ref.path, {}, roles.model.trust_remote_code
    for _, teacher in config.distillation.teachers:
        if teacher.path is not None and not teacher.is_policy:
            yield teacher.path, {}, teacher.trust_remote_code
    if scoring.classifies and scoring.model.path is not None:
        yield scoring.model.path, {}, scoring.model.trust_remote_code
