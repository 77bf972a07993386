"""The tiny policy, its workers and its batches."""

from tests.workers.conftest import make_batch, make_worker, tiny_policy, vocab_size

__all__ = ["make_batch", "make_worker", "tiny_policy", "vocab_size"]  # fixtures
