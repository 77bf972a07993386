"""Reasoning Gym: puzzles made by procedures, each answered in one turn.

Options of `tasks`: `datasets`, names or a mapping of names to their options; rows take turns.
"""

import functools
import json

import reasoning_gym
from reasoning_gym.utils import extract_answer

ASK = "\n\nThink, then give the final answer alone between <answer> and </answer>."
APART = 1_000_003
"""Distance of the seeds of two runs; entry `index` of a data set has the seed of the data set plus `index`."""


def tasks(split, seed, count, datasets=("leg_counting",)):
    """Yield the entries of the data sets in turn; those for validation have seeds of their own."""
    options = {name: {} for name in datasets} if not isinstance(datasets, dict) else datasets
    first = (2 * seed + (split != "train")) * APART
    for number in range(count):
        name = list(options)[number % len(options)]
        task = {"dataset": name, "options": options[name] or {}, "seed": first, "index": number // len(options)}
        question = _entry(task)[1]["question"]
        yield {"id": f"{name}/{first + task['index']}", "prompt": question + ASK, **task}


def start(task, seed):
    """Make the entry again."""
    dataset, entry = _entry(task)
    return {"dataset": dataset, "entry": entry, "score": 0.0, "answered": False}, None


def step(episode, action):
    """Score the answer."""
    answer = extract_answer(action["text"])
    episode["answered"] = answer is not None
    episode["score"] = float(episode["dataset"].score_answer(answer=answer, entry=episode["entry"]))
    return {"reward": 0.0, "done": True}


def score(episode):
    """Return the score of the answer, and whether there was one between the tags."""
    return {"score": episode["score"], "answered": float(episode["answered"])}


def _entry(task):
    dataset = _dataset(task["dataset"], json.dumps(task["options"], sort_keys=True), task["seed"])
    return dataset, dataset[task["index"]]


@functools.lru_cache(maxsize=256)
def _dataset(name, options, seed):
    return reasoning_gym.create_dataset(name, **{"size": APART, "seed": seed, **json.loads(options)})
