"""Warnings when the policy and the engine that sampled have come far apart."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.config.sections.algorithm import OF_STALE_TOKENS, RolloutCorrectionConfig

KEYS = "algorithm.rollout_correction"
GAP, ESS = "rollout/logprob_gap_kl", "correction/ess"
LEAST_ESS = 0.5
"""Effective sample size, a part of the tokens, below which a step is warned of."""


class GapAlarm:
    """Warns when the gap passes `gap_alarm`, and again each time it has doubled since, with the keys to set."""

    def __init__(self, config: RolloutCorrectionConfig) -> None:
        self.config = config
        self.bound = config.gap_alarm
        self.least_ess = LEAST_ESS

    def ess_text(self, metrics: Mapping[str, float]) -> str | None:
        """Write the warning of a small effective sample size, the first time and each time it has halved since."""
        ess = metrics.get(ESS)
        if ess is None or not ess < self.least_ess:
            return None
        self.least_ess = ess / 2
        return (
            f"the step learns from as many tokens as {ess:.1%} of its own would be ({ESS}), as their weights under "
            f"{self.config.text()} differ that much"
        )

    def text(self, metrics: Mapping[str, float]) -> str | None:
        """Write the warning for a step's metrics; None where there is no reason to."""
        gap = metrics.get(GAP)
        if self.bound is None or gap is None or not gap > self.bound:
            return None
        self.bound = 2 * gap
        ages = [name.removeprefix(f"{GAP}/staleness_") for name in metrics if name.startswith(f"{GAP}/staleness_")]
        by_age = ", ".join(f"{metrics[f'{GAP}/staleness_{age}']:.3g} at {age}" for age in ages)
        # Tokens as new as the policy differ only by how the engine computes.
        where = f" (by staleness: {by_age})" if any(age != "0" for age in ages) else ""
        found = (
            f"the engine's log-probs are {gap:.3g} nats a token (KL) from the policy's{where}, more than "
            f"{KEYS}.gap_alarm={self.config.gap_alarm:g}"
        )
        return f"{found}, {self._advice(metrics, stale=bool(where))}"

    def _advice(self, metrics: Mapping[str, float], *, stale: bool) -> str:
        if not self.config.changes_loss:
            if self.config.proximal == "rollout":  # then the loss's own ratio corrects, within its clip
                return f"and no token is rejected for it: set {KEYS}.reject.seq_mean_k3=0.01"
            return f"and nothing corrects for it: set {KEYS}.rollout_is={OF_STALE_TOKENS if stale else 'token'}"
        lost = f"{metrics.get('correction/masked_frac', 0.0):.1%} of the tokens weigh 0"
        ess = f"the effective sample size is {metrics.get(ESS, 1.0):.1%}"
        cure = "look whether the engine has the policy's weights, and its precision (actor_rollout_ref.model.dtype)"
        if stale:
            cure = "lower async_training.depth or async_training.max_staleness"
            cure += "" if self.config.rollout_is == OF_STALE_TOKENS else f", or set {KEYS}.rollout_is=tempered"
        return f"under {self.config.text()}: {lost}, {ess}. {cure[0].upper()}{cure[1:]}"
