"""Metrics under verl's names, for dashboards that were made for it. Only numbers that are the same are renamed."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentrl.system.metrics import Numbers

NAMES: Mapping[str, str] = {
    **{f"reward/{name}": f"critic/rewards/{name}" for name in ("mean", "min", "max")},
    "score/mean": "critic/score/mean",
    **{f"response/{name}": f"response_length/{name}" for name in ("mean", "max")},
    **{f"prompt/{name}": f"prompt_length/{name}" for name in ("mean", "max")},
    "refill/gen_batches": "train/num_gen_batches",
    "rollout/logprob_gap_kl": "rollout_corr/k3_kl",
    "actor/clip_frac": "actor/pg_clipfrac",
    "actor/clip_frac_lower": "actor/pg_clipfrac_lower",
    "critic/clip_frac": "critic/vf_clipfrac",
    "critic/value_mean": "critic/vpred_mean",
    "critic/explained_variance": "critic/vf_explained_var",
    "time/rollout": "timing_s/gen",
    "time/old_log_prob": "timing_s/old_log_prob",
    "time/ref_log_prob": "timing_s/ref",
    "time/values": "timing_s/values",
    "time/advantages": "timing_s/adv",
    "time/update_critic": "timing_s/update_critic",
    "time/update_actor": "timing_s/update_actor",
    "time/sync_weights": "timing_s/update_weights",
    "time/validation": "timing_s/testing",
    "time/save": "timing_s/save_checkpoint",
    "time/step": "timing_s/step",
}
"""verl's names by ours. Names that are the same in both (actor/pg_loss, actor/grad_norm, ...) are not listed."""
OF_THE_BATCH = ("reward/", "score/", "response/", "prompt/")
"""Beginnings of numbers that verl takes over the batch, and we over all that was drawn for it (dynamic sampling)."""
_VALIDATION = re.compile(r"val/(?P<source>.+)/(?P<measure>mean@\d+|best@\d+|greedy)")
_MEASURES = {"mean": "mean@{}", "best": "best@{}/mean"}


def verl_names(metrics: Mapping[str, float]) -> Numbers:
    """Return the metrics that verl has, too, under its names."""
    same = [name for name in metrics if name in NAMES]
    if "refill/gen_batches" in metrics:
        same = [name for name in same if not name.startswith(OF_THE_BATCH)]
    found = {NAMES[name]: metrics[name] for name in same}
    for name, value in metrics.items():
        match = _VALIDATION.fullmatch(name)
        if match is not None:
            kind, _, count = match["measure"].replace("greedy", "mean@1").partition("@")
            found.setdefault(f"val-core/{match['source']}/reward/{_MEASURES[kind].format(count)}", value)
    return found
