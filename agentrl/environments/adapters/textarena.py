"""TextArena: games; the scores are the game's rewards.

Options of `tasks`: `games`, ids or a mapping of ids to their options; rows take turns. `players`: 1, or the number of
roles, which are called player-0, player-1, ...; `prompt`: the text before the game's words, for several players.
"""

import json
import random
import zlib

import textarena

SERIAL = True  # games draw from the `random` module: see `drawing`
APART = 1_000_003
"""Distance of the seeds of two runs."""


def tasks(split, seed, count, games=("GuessTheNumber-v0",), players=1, prompt=None):
    """Yield games in turn; those for validation have seeds of their own. One player's prompt is the game's first text;
    several are each told it as their first observation."""
    for number in range(count):
        task = {"game": list(games)[number % len(games)], "seed": (2 * seed + (split != "train")) * APART + number}
        own = configured(task, games, players)
        said = (prompt or f"A game for {players} players.") if players > 1 else _said(_made({**task, **own}))[1]
        task |= {"made_with": own["made_with"], **({"roles": own["roles"]} if players > 1 else {})}
        yield {"id": f"{task['game']}/{task['seed']}", "prompt": said, **task}


def configured(task, games=("GuessTheNumber-v0",), players=1, prompt=None):
    """Return the options and the roles of the row's game, which must be one of the entry's."""
    if (game := task["game"]) not in list(games):
        raise ValueError(f"the entry has no game {game!r:.80}")
    options = (games[game] if isinstance(games, dict) else None) or {}
    roles = [f"player-{place}" for place in range(players)] if players > 1 else None
    made_with = zlib.crc32(json.dumps(options, sort_keys=True).encode())
    return {"options": options, "roles": roles, "made_with": made_with}


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
