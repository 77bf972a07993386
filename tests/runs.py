"""Fixtures of small runs, for every room; each is made once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Overrides = Callable[..., list[str]]
"""`small_run(*more, run_dir=None)`: a command's overrides."""


@pytest.fixture(scope="session")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from agentrl.quickstart.tiny_policy import make_tiny_policy

    return make_tiny_policy(tmp_path_factory.mktemp("policy"), seed=3)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's questions, few of them, with their tools."""
    from data_prep.quickstart import Recipe, make

    out = tmp_path_factory.mktemp("data")
    make(out, Recipe(seed=1, train_rows=48, val_rows=6, good_rows=64, flawed_rows=16), lambda text: None)
    return out


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A scorer that tells random answers apart, so that there is something to learn from."""
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return len(solution_str) % 7 / 7\n"
    )
    return path


@pytest.fixture
def small_run(policy_dir: Path, data_dir: Path, reward_file: Path, tmp_path: Path) -> Overrides:
    """Overrides of a run of seconds: 4 prompts x 4 trajectories a step, short answers."""

    def overrides(*more: str, run_dir: Path | None = None) -> list[str]:
        return [
            f"data.train_files={data_dir}/train.parquet",
            f"data.val_files={data_dir}/val.parquet",
            f"actor_rollout_ref.rollout.multi_turn.tool_config_path={data_dir}/tools.yaml",
            f"actor_rollout_ref.model.path={policy_dir}",
            f"custom_reward_function.path={reward_file}",
            "data.train_batch_size=4",
            "data.max_prompt_length=300",
            "data.max_response_length=48",
            "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.optim.lr=1e-3",
            "algorithm.filter_groups.enable=false",
            "trainer.total_training_steps=3",
            "trainer.save_freq=1",
            f"trainer.default_local_dir={run_dir or tmp_path / 'run'}",
            *more,
        ]

    return overrides


def refused(
    main: Callable[[list[str]], int], arguments: list[str], capsys: pytest.CaptureFixture[str], *says: str
) -> str:
    """Run a command that must end with one message, which holds these texts; return the message."""
    assert main(arguments) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    for text in says:
        assert text in message, f"{text!r} is not in: {message}"
    return message
