"""Which trajectories are written, and which files are removed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config import Config, load_config
from agentrl.errors import ConfigError
from agentrl.rollouts.contract import Task, training, validation
from agentrl.rollouts.saving import Retention, Saving


def config_of(kept: str) -> Config:
    return load_config(
        [
            f"trainer.save_trajectories={kept}",
            "data.train_batch_size=8",
            "actor_rollout_ref.rollout.n=4",
            "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        ]
    )


@pytest.mark.parametrize(
    ("kept", "prompts", "validated"),
    [("all", 8, True), ("val", 0, True), ("none", 0, False), ("0.25", 2, True), ("0.01", 1, True), ("9", 3, True)],
)
def test_a_share_or_a_number_is_whole_prompts(kept: str, prompts: int, validated: bool) -> None:
    config = config_of(kept)
    saving = Saving(config)

    def chosen(task: Task) -> list[int]:
        return [group for group in range(8) if saving.takes(task, group)]

    steps = [chosen(training(config, step)) for step in range(1, 20)]
    assert all(len(one) == prompts for one in steps)
    assert steps[0] == [group for group in range(8) if Saving(config).takes(training(config, 1), group)]
    if 0 < prompts < 8:
        assert len({tuple(one) for one in steps}) > 5, "others in each step"
    assert saving.takes(validation(config, 3, greedy=True), 5) is validated


@pytest.mark.parametrize("kept", ["0", "-1", "1.5", "some"])
def test_other_values_are_refused(kept: str) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.save_trajectories"):
        config_of(kept)


def test_the_oldest_steps_go_and_what_must_stay_stays(tmp_path: Path) -> None:
    for step in range(1, 6):
        for name in (f"trajectories/train_{step:06d}", f"updates/train_{step:06d}", f"trajectories/val_{step:06d}_x"):
            (tmp_path / f"{name}.parquet").parent.mkdir(exist_ok=True)
            (tmp_path / f"{name}.parquet").write_bytes(bytes(1000))
    assert Retention(tmp_path, None).remove_oldest(5, lambda: {5}) == []
    assert Retention(tmp_path, 1.0).remove_oldest(5, lambda: {5}) == []
    assert Retention(tmp_path, 12_000 / 1e9).remove_oldest(5, lambda: {1, 5}) == [2, 3]
    for folder in ("trajectories", "updates"):
        left = sorted(path.name for path in (tmp_path / folder).glob("train*"))
        assert left == [f"train_{step:06d}.parquet" for step in (1, 4, 5)]
    assert len(list((tmp_path / "trajectories").glob("val*"))) == 5
    assert Retention(tmp_path, 1e-9).remove_oldest(5, lambda: {5}) == [1, 4], "kept steps stay, whatever the bound is"
    assert Retention(tmp_path / "none", 1.0).remove_oldest(5, lambda: {}) == []


def test_sizes_are_read_again_before_the_room_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps write 1,000 bytes each, then 2,000; 100,000 are left."""
    (tmp_path / "trajectories").mkdir()
    read: list[int] = []
    healthy = Path.glob

    def glob(folder: Path, pattern: str) -> Iterator[Path]:
        read.extend([step] if folder.name == "trajectories" else [])
        return healthy(folder, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    retention, removed = Retention(tmp_path, 100_000 / 1e9), list[int]()
    for step in range(1, 201):
        (tmp_path / f"trajectories/train_{step:06d}.parquet").write_bytes(bytes(1000 if step < 50 else 2000))
        removed += retention.remove_oldest(step, {step}.copy)
        assert sum(one.stat().st_size for one in tmp_path.rglob("*.parquet")) <= 100_000 + 2000
    assert removed == sorted(removed) and removed[0] == 1
    assert read[:3] == [1, 2, 51], "98,000 bytes are left for 49 steps of twice 1,000"
    assert len([step for step in read if step <= 74]) < 10
    assert set(range(80, 201)) <= set(read), "each step, once the room is full"


def test_images_go_with_the_last_step_that_used_them(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        for name in (f"trajectories/train_{step:06d}.parquet", f"images/of_{step}"):
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(bytes(1000))
            os.utime(path, (step, step))
    os.utime(tmp_path / "images" / "of_1", (3, 3))  # used again
    assert Retention(tmp_path, 2500 / 1e9).remove_oldest(3, lambda: {3}) == [1, 2]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["of_1", "of_3"]


def test_a_file_that_vanished_after_it_was_listed_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "trajectories").mkdir()
    (tmp_path / "trajectories" / "train_000001.parquet").write_bytes(bytes(1000))
    (tmp_path / "trajectories" / "train_000002.parquet").symlink_to(tmp_path / "gone")
    assert Retention(tmp_path, 1e-9).remove_oldest(3, lambda: {3}) == [1]
