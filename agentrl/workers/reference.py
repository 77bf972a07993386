"""The reference policy: frozen weights that the KL is measured against."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import cast

import torch

from agentrl.config.sections.parallel import Parallel
from agentrl.engines.inspection import sample_checksum
from agentrl.model.compiled import compile_layers, text_layers
from agentrl.model.heads import PolicyModel
from agentrl.model.packed import shares_beginnings
from agentrl.model.plain import PlainModel, Twice
from agentrl.model.scores import TokenScores
from agentrl.model.sharded_load import open_model, read_weights
from agentrl.observe.report import Report
from agentrl.observe.watch import Comparison
from agentrl.parallel.collectives import local
from agentrl.parallel.mesh import Mesh
from agentrl.parallel.offload import Offload, on_device
from agentrl.parallel.shard import shard
from agentrl.system.json_value import JSON
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.forward import forward_tokens


class ReferenceWorker:
    """Log-probs under the model at `path`, at the temperature that the policy samples with."""

    def __init__(
        self,
        path: str,
        *,
        dtype: str,
        device: str | torch.device,
        temperature: float,
        log_prob_max_tokens: int,
        trust_remote_code: bool = False,
        override: Mapping[str, JSON] = {},
        parallel: Parallel | None = None,
        param_offload: bool = False,
        compiled: bool = False,
    ) -> None:
        base = open_model(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code, override=override)
        mesh = Mesh(parallel or Parallel(), device)
        self.model = PolicyModel(base.requires_grad_(False), group=mesh.sequence)
        layers = text_layers(base)
        shard(self.model, base, mesh)
        read_weights(self.model, base)
        if compiled:
            compile_layers(layers, device)
        self._base, self._plain = base, cast(PlainModel | None, None)
        self._is_whole = mesh.fsdp is None and mesh.tensor is None and mesh.sequence is None
        self.device = torch.device(device)
        self.offload = Offload(self.model, self.device, enabled=param_offload)
        self.temperature = temperature
        self._log_prob_max_tokens = log_prob_max_tokens * mesh.parallel.sequence

    @on_device
    def compute_reference_log_probs(self, batch: RaggedBatch) -> tuple[torch.Tensor, dict[str, float]]:
        """Return ([T] float32 on the CPU: log-probs of the policy tokens, 0 elsewhere; no metrics)."""
        shares = shares_beginnings(self.model.base)
        return forward_tokens(self._score, batch, self._log_prob_max_tokens, self.device, shares=shares), {}

    @on_device
    def recompute_reference(self, sequence: Sequences, temperature: float, compare: Comparison) -> Report:
        """Compare one sequence's log-probs with those of transformers' own model."""
        one = None
        if self._is_whole:
            plain = self._plain = self._plain or PlainModel(self._base)
            weights = {name.removeprefix("base."): param for name, param in self.model.named_parameters()}
            exact = all(param.dtype == torch.float32 for param in weights.values())
            one = Twice("reference", "ref_logprobs", partial(plain.logprobs, temperature=temperature), weights, exact)
        return compare(one, sequence, self.device)

    @on_device
    def sampled_checksums(self) -> dict[str, str]:
        """Return checksums of some numbers of every tensor of this rank's part, by name."""
        return {name: sample_checksum(local(param)) for name, param in self.model.named_parameters()}

    def _score(self, micro: RaggedBatch) -> torch.Tensor:
        scores: TokenScores = self.model(
            micro.ids, micro.offsets, needed=micro.mask, temperature=self.temperature, images=micro.images
        )
        return scores.logprobs
