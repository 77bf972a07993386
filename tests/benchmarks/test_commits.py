"""Comparison of two commits, on made-up values and files; whole trainings are compared by the command itself."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.commits.compare import ALIASES, Aliases, differences
from benchmarks.commits.mutants import find, near, sites
from benchmarks.commits.names import keys
from benchmarks.commits.pace import ratio
from benchmarks.commits.verl import single_keys
from benchmarks.commits.weights import ARRANGEMENTS, hashes
from tests.conftest import PROJECT


def test_gone_new_and_changed_names_are_listed_without_those_that_are_meant() -> None:
    old, new = {"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": 3, "e": 4}
    assert differences(old, new) == ["! b: 2 -> 5", "- c = 3", "+ d = 3", "+ e = 4"]
    assert differences(old, new, Aliases({"c": "d"}, ["e"])) == ["! b: 2 -> 5"]
    assert differences(old, new, Aliases({"c": "f"}, ["d", "e"])) == ["! b: 2 -> 5", "- c = 3 (as f, its alias)"]
    assert differences({"c": 3}, {"d": 4}, Aliases({"c": "d"}, [])) == ["! c: 3 -> 4"]
    assert differences(old, old) == []


def test_an_alias_is_of_one_kind_of_name(tmp_path: Path) -> None:
    file = tmp_path / "aliases.json"
    file.write_text(
        json.dumps({"keys": {"renamed": {"a": "b"}, "added": ["c"]}, "metrics": {"renamed": {}, "added": []}})
    )
    assert Aliases.read("keys", file) == Aliases({"a": "b"}, ["c"])
    assert Aliases.read("metrics", file) == Aliases({}, [])
    assert set(json.loads(ALIASES.read_text())) == {"keys", "metrics", "columns"}


def test_a_tensors_hash_is_of_its_bits_its_shape_and_its_type(tmp_path: Path) -> None:
    one = {"a": torch.zeros(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    other = {"a": torch.zeros(3, 2), "b": torch.ones(2, dtype=torch.bfloat16)}
    last_bit = {"a": torch.zeros(2, 3), "b": torch.tensor([1.0, 1.0078125], dtype=torch.bfloat16)}
    found = []
    for number, tensors in enumerate((one, dict(one), other, last_bit)):
        save_file(tensors, tmp_path / f"{number}.safetensors", metadata={"written": str(number)})
        found.append(hashes(tmp_path / f"{number}.safetensors"))
    assert found[0] == found[1] and sorted(found[0]) == ["a", "b"]
    assert [line[:4] for line in differences(found[0], found[2])] == ["! a:"]
    assert [line[:4] for line in differences(found[0], found[3])] == ["! b:"]


def test_the_page_of_keys_is_read_by_command() -> None:
    found = keys(PROJECT)
    assert found["train: algorithm.lam"] == ["number", "`1.0`"]
    assert "sft: model.path" in found and "train: model.path" not in found


def test_a_command_is_made_of_each_value_of_a_key(tmp_path: Path) -> None:
    table = tmp_path / "keys.csv"
    table.write_text('key,values (count)\na.b,"{\'1\': 3, ""\'2\'"": 1, \'cut of"\n')
    assert [one["argv"] for one in single_keys(table)] == [["a.b=1"], ["a.b='2'"]]  # type: ignore[call-overload,index]


def test_the_interval_of_a_ratio_is_as_wide_as_its_pairs_differ() -> None:
    exact = ratio([(1.0, 1.1), (2.0, 2.2), (3.0, 3.3)])
    assert exact == pytest.approx((1.1, 1.1, 1.1))
    found = ratio([(1.0, 0.9), (1.0, 1 / 0.9)] * 8)
    assert found.mean == pytest.approx(1.0)
    half = 2 * -math.log(0.9) * math.sqrt(16 / 15) / 4
    assert (found.low, found.high) == pytest.approx((math.exp(-half), math.exp(half)))


SOURCE = '''
LIMIT = 3


class Counter:
    def above(self, value: int = 2) -> bool:
        """Tell é."""
        log(f"{value + 1}")
        return value + 1 > self.limit and not self.off
'''


def test_a_fault_is_found_again_by_its_function_and_its_text(tmp_path: Path) -> None:
    found = sites(SOURCE, "data")
    changes = {(site.mutant.before, site.mutant.after) for site in found}
    assert changes == {
        ("log(f'{value + 1}')", "pass"),
        ("value + 1 > self.limit and (not self.off)", "(value + 1 > self.limit or not self.off)"),
        ("value + 1 > self.limit", "(value + 1 >= self.limit)"),
        ("value + 1", "(value - 1)"),
        ("1", "2"),
        ("not self.off", "(self.off)"),
    }
    assert {site.mutant.function for site in found} == {"Counter.above"}
    moved = tmp_path / "agentrl" / "elsewhere"
    moved.mkdir(parents=True)
    (moved / "counter.py").write_text("import os\n" + SOURCE)
    (sum_site,) = (site for site in found if site.mutant.before == "value + 1")
    place = find(tmp_path, sum_site.mutant)
    assert place is not None
    file, site = place
    assert file.read_bytes()[site.begin : site.end] == b"value + 1"
    for name, text in {
        "test_a": "x = above(1)",
        "test_b": "from agentrl.elsewhere.counter import x",
        "test_c": "abov",
    }.items():
        (tmp_path / "tests" / "data").mkdir(parents=True, exist_ok=True)
        (tmp_path / "tests" / "data" / f"{name}.py").write_text(text)
    assert near(tmp_path, sum_site.mutant, file) == ["tests/data/test_a.py", "tests/data/test_b.py"]
    (moved / "counter.py").write_text("import os\n" + SOURCE.replace("above", "below"))
    assert find(tmp_path, sum_site.mutant) is None


def test_one_arrangement_is_stopped_and_resumed() -> None:
    assert sum(len(one.stops) == 2 for one in ARRANGEMENTS.values()) == 1
