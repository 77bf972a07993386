"""The counted operations of an update with shared prompts, against the arithmetic."""

from __future__ import annotations

import pytest

from agentrl.model.layout import flat_layout
from agentrl.model.tree_layout import tree_layout
from benchmarks.gpu.shared import groups
from benchmarks.training.shared_flops import ratios, update_flops
from benchmarks.training.update_utilization import SHAPES


def test_operations_are_those_of_the_tokens_that_are_computed() -> None:
    shape, n, length = SHAPES["tiny"], 4, 256
    batch = groups(shape, 1, 0.5, length, n)
    answers = int(batch.mask.sum())
    assert (batch.num_tokens, answers) == (n * length, n * length // 2)
    tree = tree_layout(batch.ids, batch.offsets)
    assert len(tree.stored) == length // 2 + answers
    layers = {}
    for name, layout in (("flat", flat_layout(batch.offsets, batch.ids.device)), ("tree", tree)):
        total, attention = update_flops(shape, layout, answers)
        layers[name] = total - attention - 6 * answers * shape.hidden * shape.vocab
        # A product for each matrix, forward, and two backward.
        assert layers[name] == 6 * len(layout.stored) * shape.layers * shape.layer_params
    found = ratios(shape, n, 0.5, length)
    assert found["tokens"] == layers["tree"] / layers["flat"] == pytest.approx(5 / 8)
    assert found["tokens"] < found["update"] < 1 and found["attention"] < 1
