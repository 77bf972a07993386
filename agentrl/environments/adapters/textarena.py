"""TextArena: games; the scores are the game's rewards.

Options of `tasks`: `games`, ids or a mapping of ids to their options; rows take turns. `players`: 1, or the number of
roles, which are called player-0, player-1, ...; `prompt`: the text before the game's words, for several players.
"""

import random

import textarena

SERIAL = True  # games draw from the `random` module: see `drawing`
APART = 1_000_003
"""Distance of the seeds of two runs."""


def tasks(split, seed, count, games=("GuessTheNumber-v0",), players=1, prompt=None):
    """Yield games in turn; those for validation have seeds of their own. One player's prompt is the game's first text;
    several are each told it as their first observation."""
    options = {name: {} for name in games} if not isinstance(games, dict) else games
    for number in range(count):
        game = list(options)[number % len(options)]
        task = {"game": game, "options": options[game] or {}, "seed": (2 * seed + (split != "train")) * APART + number}
        if players > 1:
            task["roles"] = [f"player-{place}" for place in range(players)]
        said = (prompt or f"A game for {players} players.") if players > 1 else _said(_made(task))[1]
        yield {"id": f"{game}/{task['seed']}", "prompt": said, **task}


def start(task, seed):
    """Begin the game; one player's prompt has shown its first words."""
    episode = _made(task)
    mover, text = _said(episode)
    return episode, {"role": mover, "observation": text} if episode["roles"] else None


def step(episode, action):
    """Make a move, with the numbers that this episode would draw without the others."""
    others = random.getstate()
    random.setstate(episode["random"])
    try:
        done, _ = episode["game"].step(action=action["text"])
        if done:
            episode["rewards"], info = episode["game"].close()
            episode["invalid"] = any(one["invalid_move"] for one in info.values())
            return {"done": True}
        mover, text = _said(episode)
        return {"observation": text, "role": mover, "done": False}
    finally:
        episode["random"] = random.getstate()
        random.setstate(others)


def score(episode):
    """Return the game's rewards. In a game that did not end one player has 0; of several the next one has lost."""
    invalid, rewards = float(episode["invalid"]), episode["rewards"]
    if not episode["roles"]:
        return {"score": float(rewards[0]) if rewards else 0.0, "invalid_move": invalid}
    rewards = rewards or {episode["mover"]: -1.0}
    scores = {episode["roles"][place]: float(rewards.get(place, 0.0)) for place in episode["moved"]}
    return {"scores": scores, "invalid_move": invalid}


def _made(task):
    others = random.getstate()
    try:
        game, roles = textarena.make(f"{task['game']}-raw", **task["options"]), task.get("roles")
        game.reset(num_players=len(roles or "1"), seed=task["seed"])
        episode = {"game": game, "roles": roles, "random": random.getstate(), "rewards": None, "invalid": False}
        return {**episode, "mover": 0, "moved": []}
    finally:
        random.setstate(others)


def _said(episode):
    """Return (the role that moves, the texts since its last turn, without its own); None as the one player's role."""
    mover, heard = episode["game"].get_observation()
    episode["mover"] = mover
    episode["moved"] = sorted({*episode["moved"], mover})
    text = "\n".join(text for speaker, text, _ in heard if speaker != mover)
    return episode["roles"][mover] if episode["roles"] else None, text
