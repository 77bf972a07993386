"""Nim for two players, as an environment file: who takes the last stick wins.

Tasks for training have two roles. Tasks for validation have one, `first`, against an opponent that draws its moves.
"""

import random

PROMPT = "Nim. Take 1, 2 or 3 sticks. Who takes the last one wins. Answer with a digit."


def tasks(split, seed, count, sticks=(2, 6)):
    """Yield games with heaps of different sizes."""
    roles = ["first", "second"] if split == "train" else ["first"]
    draw = random.Random(f"{split} {seed}")
    for number in range(count):
        yield {"prompt": PROMPT, "roles": roles, "sticks": draw.randint(*sticks), "game": number}


def start(task, seed):
    """Set up the heap; the first role moves."""
    game = {"left": task["sticks"], "roles": task["roles"], "moves": 0, "winner": None, "draw": random.Random(seed)}
    return game, shown(game)


def step(game, action):
    """Take sticks. A turn without a legal move loses the game."""
    mover, legal = game["moves"] % len(game["roles"]), min(3, game["left"])
    digits = [one for one in action["text"] if one.isdigit()]
    taken = int(digits[0]) if digits else 0
    if not 1 <= taken <= legal:
        return won(game, 1 - mover)
    game["left"] -= taken
    if game["left"] == 0:
        return won(game, mover)
    if len(game["roles"]) == 1:
        game["left"] -= game["draw"].randint(1, min(3, game["left"]))
        if game["left"] == 0:
            return won(game, 1)
    game["moves"] += 1
    return shown(game)


def score(game):
    """Return 1 for the winner and -1 for the loser, of the roles that moved.

    A role whose turn the game waits for has lost: else it would pay to use up the tokens before a lost game ends.
    """
    mover = game["moves"] % len(game["roles"])
    winner = 1 - mover if game["winner"] is None else game["winner"]
    moved = game["roles"][: game["moves"] + 1]
    return {"scores": {role: 1.0 if place == winner else -1.0 for place, role in enumerate(moved)}}


def shown(game):
    """Name the next role, and show it the heap."""
    role = game["roles"][game["moves"] % len(game["roles"])]
    return {"role": role, "observation": f"{game['left']} sticks"}


def won(game, winner):
    """End the game."""
    game["winner"] = winner
    return {"done": True}
