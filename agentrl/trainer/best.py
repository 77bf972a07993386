"""The metric by which a run keeps its best checkpoint."""

from __future__ import annotations

from agentrl.checkpoint.manager import BestBy
from agentrl.config.sections.trainer import RunConfig
from agentrl.errors import ConfigError


def best_by(config: RunConfig, *, validates: bool) -> BestBy | None:
    """Read trainer.metric_for_best_model; None without. Raises ConfigError for a metric that no step has."""
    metric = config.metric_for_best_model
    if metric is None:
        return None
    if metric.startswith("val/") and not validates:
        raise ConfigError(f"trainer.metric_for_best_model={metric} is never measured: set data.val_files")
    greater = config.greater_is_better
    return BestBy(metric, not metric.endswith("loss") if greater is None else greater)
