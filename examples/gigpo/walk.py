"""A long errand with one reward at its end: walking over a grid from where the policy stands to where it is told.

Each turn is one step, and only the position is seen. A walk takes 4 to 6 steps when none is wasted, and ends after 10,
or at the goal, which alone is rewarded; wasted steps come back to places where the walk, or another of its group, has
been before. The policy is warmed up on walks most of whose steps are drawn at random.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from random import Random

from agentrl.observe.display import Display
from agentrl.quickstart.assets import WarmUp, sft_config, write_untrained
from agentrl.quickstart.tiny_policy import TinyShape
from agentrl.system.json_value import JSON
from agentrl.trainer.run_sft import train_sft
from agentrl.trajectory import Message
from data_prep.files import Row, write_parquet

SIDE = 5
STEPS = 10
DISTANCES = (4, 5, 6)
MOVES = {"left": (-1, 0), "right": (1, 0), "up": (0, 1), "down": (0, -1)}
TRAIN_ROWS, VAL_ROWS = 2048, 96
CONVERSATIONS = 6720
STRAYING = 2 / 7
"""Part of the conversations, the last ones, that go astray."""
STRAY = 0.75
"""Part of the moves of these that are drawn at random."""

INTERACTION = """\
interaction:
  - name: walk
    class_name: interactions.environment.EnvironmentInteraction
    config:
      factory: examples.gigpo.walk.Walk
      parse: examples.gigpo.walk.move_of
      max_steps: {steps}
"""

Place = tuple[int, int]


class Walk:
    """Environment with `reset(options={"start": [x, y], "goal": [x, y]})`, whose actions are the names in `MOVES`."""

    def reset(self, *, seed: int | None, options: dict[str, list[int]] | None) -> tuple[str, dict[str, float]]:
        assert options is not None, "rows name start and goal"
        self.place, self.goal = tuple(options["start"]), tuple(options["goal"])
        return name_of(self.place), {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, float]]:
        self.place = moved(self.place, action)
        there = self.place == self.goal
        return name_of(self.place), float(there), there, False, {}


def move_of(text: str, environment: Walk) -> str:
    """Read the move that an answer is."""
    if text.strip() not in MOVES:
        raise ValueError(f"say {', '.join(MOVES)}")
    return text.strip()


def name_of(place: tuple[int, ...]) -> str:
    return f"{'abcde'[place[0]]}{place[1] + 1}"


def moved(place: tuple[int, ...], move: str) -> Place:
    """Return the next place; the edge of the grid holds."""
    x, y = (min(max(place[axis] + MOVES[move][axis], 0), SIDE - 1) for axis in (0, 1))
    return x, y


def errands(seed: str) -> Iterator[tuple[Place, Place]]:
    """Draw starts and goals without end."""
    rng = Random(seed)
    places = [(x, y) for x in range(SIDE) for y in range(SIDE)]
    while True:
        start, goal = rng.sample(places, 2)
        if abs(start[0] - goal[0]) + abs(start[1] - goal[1]) in DISTANCES:
            yield start, goal


def question(goal: Place) -> str:
    return f"Walk to {name_of(goal)}."


def row(start: Place, goal: Place, index: int) -> Row:
    return {
        "data_source": "interaction/walk",
        "prompt": [{"role": "user", "content": question(goal)}],
        "agent_name": "tool_agent",
        "interaction_kwargs": {"name": "walk", "options": {"start": list(start), "goal": list(goal)}},
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"index": index},
    }


def conversation(start: Place, goal: Place, stray: float, rng: Random) -> Row:
    """Make a walk of which the part `stray` of the moves is drawn at random, the others from those that lead nearer."""
    messages: list[Message] = [{"role": "user", "content": f"{question(goal)}\n\n{name_of(start)}"}]
    place = start
    for _ in range(STEPS):
        way = [goal[axis] - place[axis] for axis in (0, 1)]
        nearer = [move for move, (x, y) in MOVES.items() if way[0] * x > 0 or way[1] * y > 0]
        move = rng.choice(list(MOVES) if rng.random() < stray else nearer)
        messages.append({"role": "assistant", "content": move})
        place = moved(place, move)
        if place == goal:
            break
        messages.append({"role": "user", "content": name_of(place)})
    if messages[-1]["role"] == "user":
        messages.pop()
    return {"messages": messages, "tools": "[]"}


def make(directory: Path, seed: int, display: Display, conversations: int = CONVERSATIONS) -> None:
    """Write rows, interaction and the warmed-up policy; what is whole is used again."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "interactions.yaml").write_text(INTERACTION.format(steps=STEPS), encoding="utf-8")
    if (directory / "policy").exists():
        return
    for split, count in (("train", TRAIN_ROWS), ("val", VAL_ROWS)):
        drawn = errands(f"{split} {seed}")
        write_parquet(directory / f"{split}.parquet", [row(*next(drawn), index) for index in range(count)])
    rng, drawn = Random(f"strays {seed}"), errands(f"warm-up {seed}")
    flawed = round(conversations * STRAYING)
    phases = [0.0] * (conversations - flawed) + [STRAY] * flawed
    write_parquet(directory / "sft.parquet", [conversation(*next(drawn), stray, rng) for stray in phases])
    making = directory / "warm-up"
    shutil.rmtree(making, ignore_errors=True)
    write_untrained(making / "untrained", directory / "sft.parquet", seed, TinyShape())
    train_sft(sft_config(directory / "sft.parquet", making, WarmUp(), seed, "cpu"), display)
    (making / "policy").rename(directory / "policy")


def keys(directory: Path) -> dict[str, JSON]:
    """Return the keys of a training on these rows."""
    return {
        "actor_rollout_ref.model.path": str(directory / "policy"),
        "data.train_files": str(directory / "train.parquet"),
        "data.val_files": str(directory / "val.parquet"),
        "data.max_prompt_length": 64,
        "data.max_response_length": 256,
        "actor_rollout_ref.rollout.multi_turn.interaction_config_path": str(directory / "interactions.yaml"),
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": STEPS,
        "actor_rollout_ref.rollout.multi_turn.max_user_turns": STEPS,
        "actor_rollout_ref.rollout.multi_turn.max_tokens_per_turn": 8,
    }
