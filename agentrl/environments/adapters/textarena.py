"""TextArena: games for one player; the score is the game's reward.

Options of `tasks`: `games`, ids or a mapping of ids to their options; rows take turns.
"""

import random

import textarena

SERIAL = True  # games draw from the `random` module: see `drawing`
APART = 1_000_003
"""Distance of the seeds of two runs."""


def tasks(split, seed, count, games=("GuessTheNumber-v0",)):
    """Yield games in turn; those for validation have seeds of their own. The prompt is the game's first text."""
    options = {name: {} for name in games} if not isinstance(games, dict) else games
    for number in range(count):
        game = list(options)[number % len(options)]
        task = {"game": game, "options": options[game] or {}, "seed": (2 * seed + (split != "train")) * APART + number}
        yield {"id": f"{game}/{task['seed']}", "prompt": _said(_made(task)["game"]), **task}


def start(task, seed):
    """Begin the game; the prompt has shown its first words."""
    episode = _made(task)
    _said(episode["game"])
    return episode, None


def step(episode, action):
    """Make a move, with the numbers that this episode would draw without the others."""
    others = random.getstate()
    random.setstate(episode["random"])
    try:
        done, _ = episode["game"].step(action=action["text"])
        if done:
            rewards, info = episode["game"].close()
            episode["score"], episode["invalid"] = rewards[0], info[0]["invalid_move"]
        return {"observation": None if done else _said(episode["game"]), "done": bool(done)}
    finally:
        episode["random"] = random.getstate()
        random.setstate(others)


def score(episode):
    """Return the game's reward; 0 for a game that did not end."""
    return {"score": float(episode["score"]), "invalid_move": float(episode["invalid"])}


def _made(task):
    others = random.getstate()
    try:
        game = textarena.make(f"{task['game']}-raw", **task["options"])
        game.reset(num_players=1, seed=task["seed"])
        return {"game": game, "random": random.getstate(), "score": 0.0, "invalid": False}
    finally:
        random.setstate(others)


def _said(game):
    """Return the game's texts since the last time, without the player's own moves."""
    _, heard = game.get_observation()
    return "\n".join(text for speaker, text, _ in heard if speaker == textarena.GAME_ID)
