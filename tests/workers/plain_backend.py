"""A second policy backend, written against `PolicyBackend` alone: plain torch in one process, a sequence at a time.

It shares no code with ours: transformers' own forward without packing, torch.optim.AdamW, torch.save. Named in configs
as `tests.workers.plain_backend:PlainPolicy`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.nn.utils import clip_grad_norm_
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from agentrl.errors import CheckpointError, ConfigError
from agentrl.model.scores import Needs, TokenScores
from agentrl.optim.schedule import lr_factor
from agentrl.runtime.ranks import RankWeights
from agentrl.trajectory.batch import RaggedBatch, Sequences
from agentrl.workers.backend import MiniBatch, PolicyBackend, PolicySettings, StepReport

FILE = "plain.pt"


class PlainPolicy:
    """Implements `PolicyBackend`."""

    def __init__(self, settings: PolicySettings) -> None:
        if settings.model.lora_rank or settings.model.dtype != "float32" or settings.optim.name != "adamw":
            raise ConfigError("the plain backend trains whole float32 models by AdamW")
        self._settings = settings
        self._model = AutoModelForCausalLM.from_pretrained(settings.model.path, dtype=torch.float32).eval()
        optim = settings.optim
        self._optim = torch.optim.AdamW(
            self._model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )

    def on_device(self) -> AbstractContextManager[None]:
        return nullcontext()

    def share_of(self, sequences: Sequences) -> RaggedBatch:
        return sequences.load()

    def sum(self, values: torch.Tensor) -> list[float]:
        found: list[float] = values.tolist()
        return found

    def step(self, mini: MiniBatch[TokenScores], step: float) -> StepReport:
        self._optim.zero_grad(set_to_none=False)
        for param in self._model.parameters():
            param.grad = torch.zeros_like(param)
        sums = {"loss": 0.0}
        for one in _each(mini.sequences.load()):
            loss, seen = mini.loss(self._forward(one, mini.needs), one)
            loss.backward()
            for name, value in (seen | {"loss": loss.detach()}).items():
                sums[name] = sums.get(name, 0.0) + value.item()
        norm = float(clip_grad_norm_(self._model.parameters(), self._settings.grad_clip))
        if not (math.isfinite(norm) and math.isfinite(sums["loss"])):
            return StepReport(sums, norm, 0.0)
        lr = self._settings.optim.lr * lr_factor(self._settings.optim, step, self._settings.total_steps)
        for group in self._optim.param_groups:
            group["lr"] = lr
        self._optim.step()
        return StepReport(sums, norm, lr)

    def log_probs(self, batch: RaggedBatch, needs: Needs) -> TokenScores:
        with torch.no_grad():
            found = [self._forward(one, needs) for one in _each(batch)]
        entropies = [one.entropy for one in found if one.entropy is not None]
        return TokenScores(torch.cat([one.logprobs for one in found]), torch.cat(entropies) if entropies else None)

    def reference_log_probs(self, batch: RaggedBatch) -> torch.Tensor:
        raise AssertionError("it has no adapters")

    def keep(self) -> None:
        self._kept = {name: value.clone() for name, value in self._model.state_dict().items()}

    @contextmanager
    def kept(self) -> Iterator[None]:
        present = {name: value.clone() for name, value in self._model.state_dict().items()}
        self._model.load_state_dict(self._kept)
        try:
            yield
        finally:
            self._model.load_state_dict(present)

    def weights(self) -> RankWeights:
        def read() -> Iterator[tuple[str, torch.Tensor | None]]:
            for name, param in self._model.named_parameters():
                yield name, param.detach()

        return RankWeights({name: tuple(param.shape) for name, param in self._model.named_parameters()}, read)

    def save(self, dir: Path, *, background: bool) -> list[str]:
        torch.save({"model": self._model.state_dict(), "optimizer": self._optim.state_dict()}, dir / FILE)
        return [FILE]

    def finish_save(self, *, wait: bool) -> bool:
        return True

    def load(self, dir: Path) -> None:
        if not (dir / FILE).exists():
            raise CheckpointError(f"{dir}: half-written, {FILE} is missing")
        state = torch.load(dir / FILE)
        self._model.load_state_dict(state["model"])
        self._optim.load_state_dict(state["optimizer"])

    def export(self, dir: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        self._model.save_pretrained(dir)
        tokenizer.save_pretrained(dir)

    def _forward(self, one: RaggedBatch, needs: Needs) -> TokenScores:
        logits = self._model(input_ids=one.ids[None]).logits[0, :-1].float() / self._settings.temperature
        distribution = torch.log_softmax(logits, dim=-1)
        chosen = distribution.gather(1, one.ids[1:, None])[:, 0]
        entropy = -(distribution.exp() * distribution).sum(dim=-1)

        def placed(values: torch.Tensor) -> torch.Tensor:
            return torch.where(one.mask, torch.cat([values.new_zeros(1), values]), 0.0)

        return TokenScores(placed(chosen), placed(entropy) if "entropy" in needs else None)


def _each(batch: RaggedBatch) -> Iterator[RaggedBatch]:
    for row in range(len(batch)):
        yield batch.select([row])


def _implements(settings: PolicySettings) -> PolicyBackend:
    return PlainPolicy(settings)  # mypy reads this
