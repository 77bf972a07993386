"""A run whose parts are all of a user's files: data set, order, agent loop, tool calls, scorer and logger."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.conftest import forked_command

MINE = """
import json

from pydantic import BaseModel

from agentrl.agent_loop import AgentLoop
from agentrl.chat.formats.parsers import CallFormat, Found
from agentrl.data.sampler import Sampler
from agentrl.observe.tracking import Sink
from agentrl.trajectory import Status
from agentrl.trajectory.sample import Sample


class Sums:
    def __init__(self, files):
        self.count = int(files[0])

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        prompt = [{"role": "user", "content": f"{index} + 1 = ?"}]
        return Sample(prompt, "sums/easy", "once", ground_truth=str(index + 1))


class Backwards(Sampler):
    def __init__(self, data, batch_size, seed):
        super().__init__(data, batch_size, seed)
        self.at = len(data)

    def next_batch(self):
        self.at -= self.batch_size
        return range(self.at, self.at + self.batch_size)

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Once(AgentLoop):
    async def run(self, episode):
        await episode.start(episode.sample.prompt)
        await episode.generate(max_tokens=8)
        episode.finish(Status.COMPLETED)


class Options(BaseModel):
    modulus: int = 7


def remainder(solution_str, trajectory, options: Options):
    return {"score": len(solution_str) % options.modulus, "question": int(trajectory.messages[0]["content"].split()[0])}


CALLS = CallFormat("<call>", "</call>", lambda text, tools: [Found(text, {})])


class Questions(Sink):
    def write(self, step, metrics):
        with (self.run.dir / "questions.jsonl").open("a") as file:
            file.write(json.dumps([step, metrics.get("score/question")]) + "\\n")

    def truncate_after(self, step):
        path = self.run.dir / "questions.jsonl"
        if path.exists():
            path.write_text("".join(line for line in path.open() if json.loads(line)[0] <= step))

    def close(self):
        pass
"""


@pytest.mark.timeout(360)
def test_a_run_of_own_parts_is_gone_on_with(small_run: Callable[..., list[str]], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "loops.yaml").write_text("- name: once\n  _target_: mine.py:Once\n")
    own = [
        *("data.custom_cls.path=mine.py", "data.custom_cls.name=Sums", "data.train_files='12'", "data.val_files=null"),
        "data.sampler.name=mine.py:Backwards",
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
        "actor_rollout_ref.rollout.multi_turn.tool_config_path=null",
        "actor_rollout_ref.rollout.multi_turn.format=mine.py:CALLS",
        "custom_reward_function.path=null",
        "reward_model.scorers={sums/*: {name: 'mine.py:remainder', kwargs: {modulus: 5}}}",
        "trainer.logger=[jsonl,mine.py:Questions]",
    ]
    for steps in (1, 2):
        done = forked_command(small_run(*own, f"trainer.total_training_steps={steps}"), tmp_path)
        assert done.returncode == 0, done.stderr
    questions = [json.loads(line) for line in (tmp_path / "run" / "questions.jsonl").read_text().splitlines()]
    assert questions == [[1, 9.5], [2, 5.5]], "rows 8 to 11, then 4 to 7"
