"""The files that a config names reach Ray's processes, which may run on machines that do not have them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.config.sections.reward import CustomRewardConfig
from agentrl.reward import NaiveRewardManager, score_all
from agentrl.runtime.ray.session import Surroundings
from agentrl.system.targets import load_target
from agentrl.tool.toolset import ToolSet
from agentrl.trajectory import Trajectory
from agentrl.trajectory.sample import Sample

ray = pytest.importorskip("ray")

SCORER = """
from dataclasses import dataclass

@dataclass
class Judgement:
    score: float

def half(solution_str):
    return Judgement(0.5).score

def broken(solution_str):
    return 1 / 0

def shout(text: str) -> str:
    "Say it loudly."
    return text.upper()
"""


@pytest.fixture
def ray_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Ray whose processes start in another folder than this one; gives this one, where the user's file is."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    ray.shutdown()


async def _scored(surroundings: Surroundings, name: str) -> tuple[str, float | None, str | None]:
    surroundings.enter()
    reward = NaiveRewardManager(custom=CustomRewardConfig(path="mine.py", name=name))
    trajectory = Trajectory("t", 0, "any", "single_turn")
    try:
        await score_all(reward, [trajectory], Sample([], "any", "single_turn"))
    except Exception as error:
        return str(Path.cwd()), None, str(error)
    return str(Path.cwd()), trajectory.score, trajectory.failure


class Actor:
    """A process that is kept."""

    async def scored(self, surroundings: Surroundings, name: str) -> tuple[str, float | None, str | None]:
        return await _scored(surroundings, name)

    def tools(self, path: str) -> list[str]:
        return ToolSet.from_yaml(path).names


@pytest.mark.timeout(120)
def test_a_worker_without_the_files_has_the_drivers_texts(ray_elsewhere: Path) -> None:
    file = ray_elsewhere / "mine.py"
    file.write_text(SCORER)
    NaiveRewardManager(custom=CustomRewardConfig(path="mine.py", name="half"))  # the driver loads what the config names
    yaml = ray_elsewhere / "tools.yaml"
    yaml.write_text("tools: [{function: 'mine.py:shout'}]")
    ToolSet.from_yaml(yaml)
    surroundings = Surroundings.here()
    file.unlink()
    yaml.unlink()
    gone = Surroundings(str(ray_elsewhere / "not on that machine"), surroundings.files)
    actor = ray.remote(num_cpus=1)(Actor).remote()
    folder, score, failure = ray.get(actor.scored.remote(gone, "half"))
    assert (folder, score, failure) == (str(ray_elsewhere / "elsewhere"), 0.5, None)
    folder, score, failure = ray.get(actor.scored.remote(gone, "broken"))
    assert ray.get(actor.tools.remote(str(yaml))) == ["shout"]
    assert score is None and failure is not None and "mine.py:12 in broken: return 1 / 0" in failure


def test_the_driver_gives_its_folder_and_what_it_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.py").write_text("x = 1\n")
    assert load_target("other.py:x", "k") == 1
    surroundings = Surroundings.here()
    assert surroundings.folder == str(tmp_path) and surroundings.files["other.py"] == "x = 1\n"
