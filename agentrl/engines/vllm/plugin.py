"""Plugin of vLLM's (entry point `vllm.general_plugins`), which vLLM loads in each of its processes.

It registers the weight transfer `agentrl`. A worker that uses this transfer reports log-probs of softmax(logits /
temperature) that no top-k or top-p cuts off. On a CPU, a request that continues an aborted answer samples the rest of
the whole answer. Other servers stay as they are, but for generators on a CPU, which can go back. Written for vLLM 0.32.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    Sampled = tuple[torch.Tensor, torch.Tensor | None]
    """Sampled ids [n], and the log-probs [n, V] of all tokens where the server reports them after truncation."""
    Sample = Callable[
        [TopKTopPSampler, torch.Tensor, dict[int, torch.Generator], torch.Tensor | None, torch.Tensor | None], Sampled
    ]

BACKEND = "agentrl"
"""Name of the weight transfer, for `--weight-transfer-config '{"backend": "agentrl"}'`."""
ARCHITECTURE = "architecture"
"""Method of `EXTENSION` that answers the class name of the model."""
HELD = "held"
"""Method that answers the name of the weights that the model holds."""
CHECKSUMS = "arrived"
"""Method that answers the checksums of the weights that are kept for updates by changes."""
EXTENSION = "agentrl.engines.vllm.receiver.Extension"
NEEDED = (
    f"""--weight-transfer-config '{{"backend": "{BACKEND}"}}'""",
    f"--worker-extension-cls {EXTENSION}",
    "--logprobs-mode processed_logprobs",
    "--enable-scale-out",
    "--scheduling-policy priority",
    "--enable-prompt-tokens-details",
)
"""Arguments that each server needs."""
TRAINED = threading.Event()
"""Set in a worker whose weights agentrl sends: it reports and samples as agentrl needs it."""


def install() -> None:
    """Register the weight transfer, and prepare what `TRAINED` switches on."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState

    if BACKEND in WeightTransferEngineFactory._registry:
        return
    WeightTransferEngineFactory.register_engine(BACKEND, "agentrl.engines.vllm.receiver", "Receiver")
    for name in ("forward_native", "forward_cpu"):
        setattr(TopKTopPSampler, name, _untruncated(getattr(TopKTopPSampler, name)))
    CachedRequestState.__post_init__ = _placed(CachedRequestState.__post_init__)


def _untruncated(sample: Sample) -> Sample:
    """Wrap a method that samples: its log-probs are those before top-k and top-p."""

    @functools.wraps(sample)
    def forward(
        sampler: TopKTopPSampler,
        logits: torch.Tensor,
        generators: dict[int, torch.Generator],
        k: torch.Tensor | None,
        p: torch.Tensor | None,
    ) -> Sampled:
        truncates = (
            TRAINED.is_set() and sampler.logprobs_mode == "processed_logprobs" and (k is not None or p is not None)
        )
        whole = logits.log_softmax(dim=-1, dtype=torch.float32) if truncates else None
        ids, logprobs = sample(sampler, logits, generators, k, p)
        return ids, logprobs if whole is None else whole

    return forward


class CPUGenerator(torch.Generator):
    """Generator of a request on a CPU, where vLLM draws one number a token.

    vLLM draws a number after each part of a prompt, and takes it back by an offset, as CUDA's generators have: 4 a
    number. torch's generators on a CPU have none, so vLLM's worker would end at the first prompt that is read in parts.
    """

    def place(self, request: CachedRequestState, first: int) -> None:
        """Go to the number `first`, which the request's first token is drawn by."""
        self._request, self._first = weakref.ref(request), first
        self._go_to(first)

    def get_offset(self) -> int:
        """Return the offset after the number that was drawn last."""
        request = self._request()
        return 4 * (self._first + (0 if request is None else len(request.output_token_ids)) + 1)

    def set_offset(self, offset: int) -> torch.Generator:
        """Go to an offset."""
        self._go_to(offset // 4)
        return self

    def _go_to(self, number: int) -> None:
        self.manual_seed(self.initial_seed())
        torch.randint(0, 2**31, (number,), generator=self)


def _placed(made: Callable[[CachedRequestState], None]) -> Callable[[CachedRequestState], None]:
    """Wrap the making of a request: its generator begins at the place of its first token.

    A generator on a GPU counts in another way, and stays as it is.
    """

    @functools.wraps(made)
    def post_init(request: CachedRequestState) -> None:
        made(request)
        generator = request.generator
        if generator is not None and generator.device.type == "cpu":
            request.generator = CPUGenerator().manual_seed(generator.initial_seed())
            request.generator.place(request, request.num_prompt_tokens if TRAINED.is_set() else 0)

    return post_init
