"""Adapters that servers serve: those of the policy, and frozen ones of roles, checked before anything is sampled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open

from agentrl.config.adapters import SERVED_LAYERS, most_adapters, unserved
from agentrl.config.sections.rollouts import RolloutsConfig
from agentrl.engines.servers.client import ServerClient, ServerInfo
from agentrl.engines.servers.model import ModelFacts
from agentrl.errors import ConfigError
from agentrl.model.lora import CONFIG, WEIGHTS, read_plain_lora


def find_frozen_adapters(config: RolloutsConfig, facts: ModelFacts, notify: Callable[[str], None]) -> dict[str, Path]:
    """Find the folders of the config's frozen adapters by name. `notify` says where one names another base.

    Raises ConfigError for files that cannot be read, a rank above the policy's, and layers of another model.
    """
    served = config.served_adapters
    found: dict[str, Path] = {}
    for name, text in config.actor_rollout_ref.rollout.frozen_adapters.items():
        folder, at = Path(text).absolute(), f"actor_rollout_ref.rollout.roles: adapter={text}"
        theirs = read_plain_lora(folder, at)
        rank = theirs.get("r")
        if served is None or not isinstance(rank, int) or not 0 < rank <= served.lora_rank:
            most = 0 if served is None else served.lora_rank
            raise ConfigError(
                f"{at}: {CONFIG} has r={rank}, and servers serve adapters up to the policy's lora_rank={most}"
            )
        shapes = read_shapes(folder, at)
        layers = {key.rpartition(".lora_")[0] for key in shapes}
        if others := unserved(layers):
            raise ConfigError(f"{at}: servers run no adapters of {', '.join(others)}")
        if (problem := facts.other_base(shapes)) is not None:
            raise ConfigError(f"{at}: {problem}")
        path, base = config.actor_rollout_ref.model.path, str(theirs.get("base_model_name_or_path"))
        if Path(base).resolve() != Path(path).resolve():
            notify(f"{at}: it was made for {base}, and plays on {path}")
        found[name] = folder
    return found


def check_rank(info: ServerInfo, url: str, config: RolloutsConfig, flags: Callable[[int, int], str]) -> None:
    """Check that a server serves adapters of the policy's rank, where it is to be sent any. Raises ConfigError.

    `flags` writes the arguments that such a server needs, of the rank and the number of adapters at once.
    """
    adapters, at_once = config.served_adapters, most_adapters(config.actor_rollout_ref.rollout.frozen_adapters)
    if adapters is not None and info.max_lora_rank < adapters.lora_rank:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_merge=false: {url} serves no adapters of rank {adapters.lora_rank}. Start "
            f"it with {flags(adapters.lora_rank, at_once)} --lora-target-modules "
            f"{' '.join(SERVED_LAYERS)}, or set lora_merge=true"
        )


async def check_held(client: ServerClient, frozen: Mapping[str, Path]) -> None:
    """Check that a server that somebody else started has these adapters. Raises ConfigError, EngineError."""
    held = await client.held_adapters()
    for name, folder in frozen.items():
        if Path(held.get(name, "")) != folder:
            raise ConfigError(
                f"actor_rollout_ref.rollout.roles: {client.url} has no adapter {name} of {folder}; it has "
                f"{', '.join(f'{one}={path}' for one, path in held.items()) or 'none'}. Start it with "
                f"--lora-paths (SGLang) or --lora-modules (vLLM) {name}={folder}"
            )


def read_shapes(folder: Path, at: str) -> dict[str, list[int]]:
    """Read the shapes of an adapter's tensors, pairs of A [R, I] and B [O, R], by peft's names.

    Raises ConfigError, which begins with `at`.
    """
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            shapes = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{at}: {WEIGHTS} cannot be read: {error}") from error
    sides = {".lora_A.weight": ".lora_B.weight", ".lora_B.weight": ".lora_A.weight"}
    for name, shape in shapes.items():
        layer, mark, end = name.rpartition(".lora_")
        other = sides.get(mark + end)
        if other is None or layer + other not in shapes or len(shape) != 2:
            raise ConfigError(f"{at}: {WEIGHTS}: {name}: expected matrices lora_A and lora_B of layers")
    return shapes
