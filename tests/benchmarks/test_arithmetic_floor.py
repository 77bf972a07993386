"""The benchmark's floor counts the matrix products of a step, no more and no less."""

from agentrl.quickstart.tiny_policy import TinyShape
from benchmarks.training.arithmetic_floor import Work, products

SHAPE = TinyShape(vocab=409, hidden=128, layers=3, heads=4, kv_heads=2, intermediate=384)
LAYERS = 3 * (128 * 128 + 2 * 128 * 64 + 128 * 128 + 3 * 128 * 384)
"""Weights of the linear layers."""


def linear_flops(work: Work) -> float:
    """Without the products between tokens, the only ones in batches."""
    return sum(product.flops for product in products(SHAPE, work) if product.batch == 1)


def test_linear_layers_cost_two_flops_a_weight_and_token_and_three_times_that_in_the_update() -> None:
    work = Work(prompts=1, generations=1, prompt=97, call=27, observation=17, answer=7)
    tokens, scored = 97 + 27 + 17 + 7, 27 + 7
    rollout = 2 * LAYERS * (tokens - 1) + 2 * 128 * 409 * scored  # the last token is sampled, but not computed
    update = 3 * (2 * LAYERS * tokens + 2 * 128 * 409 * scored)
    assert linear_flops(work) == rollout + update


def test_a_prompt_is_computed_once_for_all_its_trajectories() -> None:
    one, eight = (Work(1, generations, 97, 27, 17, 7) for generations in (1, 8))
    shared = linear_flops(one) * 8 - linear_flops(eight)
    assert shared == 7 * (4 * 2 * LAYERS * 97 + 2 * 128 * 409)
