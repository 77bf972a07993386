"""A user's own score function: loading it, and what its signature may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.sections.reward import CustomRewardConfig
from agentrl.errors import ConfigError
from agentrl.reward import NaiveRewardManager
from tests.naming import Names, assert_names


def manager(tmp_path: Path, text: str, **config: object) -> NaiveRewardManager:
    path = tmp_path / "my_reward.py"
    path.write_text(text)
    return NaiveRewardManager(None, CustomRewardConfig.model_validate({"path": str(path), **config}))


@pytest.mark.parametrize(
    "text",
    [
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1",
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1",
        "def compute_score(solution_str): return 1",
        "def compute_score(trajectory): return 1",
        "def compute_score(**kwargs): return 1",
        "class S:\n  async def __call__(self, solution_str, bonus=0): return 1\ncompute_score = S()",
        "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass D:\n  x: int\n"
        "def compute_score(solution_str): return D(1).x",
    ],
)
def test_accepted(tmp_path: Path, text: str) -> None:
    manager(tmp_path, text).check(["a source that nobody knows"])


@pytest.mark.parametrize(
    ("text", "config", "says"),
    [
        (
            "def compute_scores(solution_str): return 1",
            {},
            ("'compute_score'", "'compute_scores'", "compute_scores"),
        ),
        ("x = 1", {"name": "mine"}, "'mine'"),
        ("compute_score = 3", {}, "found 3"),
        ("class compute_score: ...", {}, "function"),
        ("1 / 0", {}, ("my_reward.py", "ZeroDivisionError")),
        ("import sys; sys.exit(3)", {}, ("my_reward.py", "SystemExit")),
        ("def f(:", {}, ("failed:", "SyntaxError")),
        (
            "def compute_score(solution_str, groundtruth): return 1",
            {},
            ("compute_score(solution_str", "'groundtruth'", "'ground_truth'"),
        ),
        ("def compute_score(solution_str, /): return 1", {}, "'solution_str'"),
        ("def compute_score(ground_truth): return 1", {}, ("solution_str", "the parameter")),
        (
            "def compute_score(solution_str, weight=1): return 1",
            {"reward_kwargs": {"wieght": 2}},
            ("reward_kwargs", "'wieght'", "'weight'"),
        ),
        (
            "def compute_score(solution_str, **kw): return 1",
            {"reward_kwargs": {"ground_truth": 2}},
            ("reward_kwargs", "'ground_truth'", "may not"),
        ),
    ],
)
def test_refused_with_file_function_and_remedy(
    tmp_path: Path, text: str, config: dict[str, object], says: Names
) -> None:
    with pytest.raises(ConfigError) as raised:
        manager(tmp_path, text, **config)
    assert_names(raised.value, says)
    assert "my_reward.py" in str(raised.value)


@pytest.mark.parametrize("name", ["nope.py", "notes.txt"])
def test_files_that_cannot_be_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ConfigError, match=name):
        NaiveRewardManager(None, CustomRewardConfig(path=str(tmp_path / name)))
