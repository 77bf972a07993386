"""YAML that anybody may have written: aliases are counted before anything is made of it, and errors have one class."""

from __future__ import annotations

import yaml

MOST_NODES = 100_000
"""Values of a file where each alias counts as often as it is written. A run's config has some thousand."""
UNREADABLE = (ValueError, AttributeError, RecursionError)
"""Errors of PyYAML for `2020-99-99`, `!!int x` and 5,000 digits; for `!!timestamp x`; for depth."""
LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def load_yaml(text: str | bytes, loader: type[yaml.SafeLoader] = LOADER) -> object:
    """Read one document. Raises YAMLError, also for values that PyYAML's constructors and recursion fail at."""
    try:
        return yaml.load(text, loader)
    except UNREADABLE as error:
        raise yaml.YAMLError(f"a value cannot be read: {error}") from error


def check_aliases(text: str | bytes) -> None:
    """Raise ValueError where few bytes stand for too much, by aliases or by depth; YAMLError for text that is no YAML.

    A reader that copies values (OmegaConf, a dump) would need memory for all of them.
    """
    sizes: dict[yaml.Node, int] = {}

    def size(node: yaml.Node) -> int:
        if node not in sizes:
            sizes[node] = MOST_NODES + 1  # met again below itself: without end
            below = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
            sizes[node] = 1 + (0 if isinstance(node, yaml.ScalarNode) else sum(map(size, below)))
        return sizes[node]

    try:
        root = yaml.compose(text, LOADER)
        found = 0 if root is None else size(root)
    except RecursionError:
        raise ValueError("its values lie too deep in each other") from None
    if found > MOST_NODES:
        raise ValueError(f"its aliases (*name) stand for more than {MOST_NODES} values")
