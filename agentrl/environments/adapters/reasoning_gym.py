"""Reasoning Gym: puzzles made by procedures, each answered in one turn.

Options of `tasks`: `datasets`, names or a mapping of names to their options; rows take turns.
"""

import difflib
import functools
import json
import zlib

import reasoning_gym
from reasoning_gym.utils import extract_answer

ASK = "\n\nThink, then give the final answer alone between <answer> and </answer>."
EVALUATED = (
    *("binary_matrix", "codeio", "countdown", "intermediate_integration", "n_queens", "polynomial_multiplication"),
    *("puzzle24", "simple_integration", "spiral_matrix", "string_insertion"),
)
"""Data sets whose scorers run the answer, which a model wrote, as code."""
ENDLESS = ("coin_flip",)
"""Data sets whose scorers compute a number such as 1e400000000, which a model may write, without end."""
APART = 1_000_003
"""Distance of the seeds of two runs; entry `index` of a data set has the seed of the data set plus `index`."""


def tasks(split, seed, count, datasets=("leg_counting",)):
    """Yield the entries of the data sets in turn; those for validation have seeds of their own."""
    options = _options(datasets)
    first = (2 * seed + (split != "train")) * APART
    for number in range(count):
        name = list(options)[number % len(options)]
        task = {"dataset": name, "seed": first, "index": number // len(options), "made_with": _digest(options[name])}
        question = _entry({**task, "options": options[name]})[1]["question"]
        yield {"id": f"{name}/{first + task['index']}", "source": name, "prompt": question + ASK, **task}


def configured(task, datasets=("leg_counting",)):
    """Return the options of the row's data set, which must be one of the entry's."""
    if (name := task["dataset"]) not in (options := _options(datasets)):
        raise ValueError(f"the entry has no data set {name!r:.80}")
    return {"options": options[name], "made_with": _digest(options[name])}


def start(task, seed):
    """Make the entry again."""
    dataset, entry = _entry(task)
    name = task["dataset"]
    return {"task": name, "dataset": dataset, "entry": entry, "score": 0.0, "answered": False, "unreadable": 0.0}, None


def step(episode, action):
    """Score the answer."""
    answer = extract_answer(action["text"])
    episode["answered"] = answer is not None
    try:
        episode["score"] = float(episode["dataset"].score_answer(answer=answer, entry=episode["entry"]))
    except Exception as error:  # some scorers cannot read every text, and the policy may write any
        print(f"{episode['task']}: the scorer fails on {answer!r:.200}: {error!r}")
        episode["unreadable"] = 1.0
    return {"reward": 0.0, "done": True}


def score(episode):
    """Return the score of the answer, whether there was one between the tags, and whether the scorer failed on it."""
    return {"score": episode["score"], "answered": float(episode["answered"]), "unreadable": episode["unreadable"]}


def _options(datasets):
    """Check the entry's data sets; return the options of each."""
    for name in datasets:
        if name in EVALUATED:
            raise ValueError(f"datasets: the scorer of {name} runs answers, which a model wrote, as code")
        if name in ENDLESS:
            raise ValueError(f"datasets: the scorer of {name} does not end on numbers that a model may write")
        if name not in (known := sorted(reasoning_gym.factory.DATASETS)):
            near = difflib.get_close_matches(name, known, 3) or known
            raise ValueError(f"datasets: there is no data set {name}; did you mean {', '.join(near)}?")
    return {name: (datasets[name] if isinstance(datasets, dict) else None) or {} for name in datasets}


def _digest(options):
    return zlib.crc32(json.dumps(options, sort_keys=True).encode())


def _entry(task):
    dataset = _dataset(task["dataset"], json.dumps(task["options"], sort_keys=True), task["seed"])
    return dataset, dataset[task["index"]]


@functools.lru_cache(maxsize=256)
def _dataset(name, options, seed):
    return reasoning_gym.create_dataset(name, **{"size": APART, "seed": seed, **json.loads(options)})
