"""The reward model: a classifier with one label, frozen, which scores whole conversations."""

from __future__ import annotations

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from agentrl.config.sections.parallel import Parallel
from agentrl.config.sections.reward import RewardModelConfig, ScoreModelConfig
from agentrl.errors import ConfigError
from agentrl.model.heads import ScoreModel
from agentrl.model.packed import shares_beginnings, use_packed_attention
from agentrl.model.sharded_load import read_weights
from agentrl.parallel.collectives import world_size
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.shard import shard
from agentrl.trajectory.batch import RaggedBatch
from agentrl.workers.forward import forward_tokens


class RewardModelWorker:
    """Scores by the model of `reward_model.model.path`; its sequences are made by `agentrl.reward.model_input`."""

    def __init__(self, config: RewardModelConfig, *, dtype: str, device: str | torch.device) -> None:
        """Raises ConfigError when there is no such model, or it is no classifier with one label."""
        classifier = open_classifier(config.model, dtype, device).requires_grad_(False)
        backbone, score = classifier.base_model, classifier.score
        assert isinstance(backbone, PreTrainedModel) and isinstance(score, nn.Linear)
        self.model = ScoreModel(backbone, score)
        shard(self.model, self.model.base, Mesh(Parallel(), device))
        read_weights(self.model, classifier)
        self.device = torch.device(device)
        self._max_tokens = config.forward_max_token_len_per_gpu

    def compute_scores(self, batch: RaggedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return ([T] float32 on the CPU: the score of each sequence at its last token, 0 elsewhere; no metrics)."""

        def scores(micro: RaggedBatch) -> torch.Tensor:
            """Score each sequence at its last token: [T] float32, 0 elsewhere."""
            found: torch.Tensor = self.model(micro.ids, micro.offsets)
            return found

        shares = shares_beginnings(self.model.base)
        return forward_tokens(scores, batch, self._max_tokens, self.device, shares=shares), {}


def open_classifier(config: ScoreModelConfig, dtype: str, device: str | torch.device) -> PreTrainedModel:
    """Load the classifier, on packed attention; on several ranks without its weights (see `read_weights`).

    Raises ConfigError.
    """
    path, trust = config.path, config.trust_remote_code
    assert path is not None
    key, kind = f"reward_model.model.path={path}", getattr(torch, dtype)
    missing: set[str] = set()
    try:
        made = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        if made.num_labels != 1:
            raise ConfigError(
                f"{key}: a reward model has one label, and this one {made.num_labels} ({made.architectures})"
            )
        if world_size() == 1:
            classifier, report = AutoModelForSequenceClassification.from_pretrained(
                path,
                config=made,
                dtype=kind,
                trust_remote_code=trust,
                output_loading_info=True,
                use_safetensors=True,
            )
            missing = report["missing_keys"]
        else:
            with torch.device("meta"):
                classifier = AutoModelForSequenceClassification.from_config(made, dtype=kind, trust_remote_code=trust)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigError(f"{key}: expected a sequence classification model of transformers: {error}") from error
    if missing:
        raise ConfigError(f"{key} is no reward model: it has no weights for {', '.join(sorted(missing))}")
    if not isinstance(getattr(classifier, "score", None), nn.Linear):
        raise ConfigError(f"{key}: {type(classifier).__name__} has no linear head `score`")
    if world_size() == 1:
        use_packed_attention(classifier.to(device).base_model)
    return classifier.eval()
