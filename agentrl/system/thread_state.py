"""torch's settings that each thread has for itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch


def torch_state() -> Callable[[], AbstractContextManager[None]]:
    """Capture the calling thread's torch settings; entering the returned context sets them in another thread.

    They are the number of threads, grad and inference mode, autocast, the default device, and CUDA's current device
    and stream. The default dtype, deterministic algorithms, and matmul precision are the process's, not a thread's.
    """
    threads = torch.get_num_threads()
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    cached = torch.is_autocast_cache_enabled()
    autocast = {kind: torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)}
    device = torch.get_default_device()
    stream = torch.cuda.current_stream() if torch.cuda.is_initialized() else None

    @contextmanager
    def entered() -> Iterator[None]:
        # Asking sets this thread's number, too, as far as it is the process's. Setting it again where it is right
        # already would switch off MKL's dynamic choice for all threads, and with it change numbers.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with ExitStack() as stack:
            if inference:
                stack.enter_context(torch.inference_mode())
            stack.enter_context(torch.set_grad_enabled(grad))
            for kind, dtype in autocast.items():
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cached))
            if device != torch.get_default_device():
                stack.enter_context(device)
            if stream is not None:
                stack.enter_context(torch.cuda.stream(stream))  # its device becomes the current one
            yield

    return entered
