"""A fault: a rank that cannot start. Its process imports nothing, which a rank's takes seconds for."""


class UnstartableRank:
    """Stands for a rank on a machine that lacks a package."""

    def __init__(self) -> None:
        raise ModuleNotFoundError("No module named 'agentrl'")

    def make(self) -> None: ...
