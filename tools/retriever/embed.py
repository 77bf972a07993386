"""Text embeddings by a model of sentence embeddings: mean of the last layer over the text's tokens, length 1."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pydantic

from agentrl.errors import ConfigError

MADE = "models/minilm"
"""Folder of the documented embedding model (all-MiniLM-L6-v2, 384 dimensions, English)."""
MOST_TOKENS = 256
BATCH = 64

Vectors = npt.NDArray[np.float32]  # [texts, dimensions]

_PROBE = "The capital of France is Paris."
_PROBED = 8


class EmbeddingSpec(pydantic.BaseModel):
    """Model and prefixes of the vectors that an index holds."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    model: str
    """Folder of the model."""
    query_prefix: str = ""
    """Text before queries that some models want, e.g. e5 `query: `."""
    passage_prefix: str = ""
    """Text before documents that some models want, e.g. e5 `passage: `."""


class Embedder:
    """Embedding model in memory. One thread at a time."""

    def __init__(self, spec: EmbeddingSpec) -> None:
        """Load the model. Raises ConfigError when there is no such model or what it needs is not installed."""
        import torch  # takes seconds and 200 MB, which a lexical index does without
        from transformers import AutoModel, AutoTokenizer

        folder = _folder(spec.model)
        self.spec = spec.model_copy(update={"model": str(folder)})
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
            self._model = AutoModel.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
        except (OSError, ValueError) as error:
            raise ConfigError(f"embedding model {spec.model}: cannot be loaded: {error}") from error
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._model.to(self._device)

    def passages(self, texts: Sequence[str]) -> Vectors:
        """Embed documents: [texts, dimensions] float32."""
        return self._vectors([self.spec.passage_prefix + text for text in texts])

    def queries(self, texts: Sequence[str]) -> Vectors:
        """Embed queries: [texts, dimensions] float32."""
        return self._vectors([self.spec.query_prefix + text for text in texts])

    @property
    def dimensions(self) -> int:
        """Dimensions of a vector."""
        return int(self._model.config.hidden_size)

    def probe(self) -> list[float]:
        """Return the beginning of the vector of a fixed text, by which the model is known."""
        return [round(float(number), 4) for number in self.passages([_PROBE])[0, :_PROBED]]

    def _vectors(self, texts: Sequence[str]) -> Vectors:
        """Embed texts; those of alike length go through the model together, so that little is padding."""
        import torch

        order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
        pieces = []
        for begin in range(0, len(order), BATCH):
            batch = [texts[place] for place in order[begin : begin + BATCH]]
            inputs = self._tokenizer(batch, padding=True, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
            inputs = inputs.to(self._device)
            with torch.inference_mode():
                states = self._model(**inputs).last_hidden_state  # [texts, tokens, dimensions]
                mask = inputs["attention_mask"].unsqueeze(-1)
                mean = (states * mask).sum(1) / mask.sum(1)
                pieces.append(torch.nn.functional.normalize(mean, dim=1).float().cpu().numpy())
        found = np.concatenate(pieces)
        vectors = np.empty_like(found)
        vectors[order] = found
        return vectors


def _folder(model: str) -> Path:
    if not Path(model).is_dir():
        raise ConfigError(
            f"embedding model {model}: expected a model's folder; there is no such one. `python -m data_prep.model "
            f"minilm --out {MADE}` makes one"
        )
    return Path(model).absolute()
