"""agentrl: reinforcement learning for language-model agents that use tools over many turns."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import TYPE_CHECKING

from agentrl.version import __version__ as __version__

if sys.version_info < (3, 11):  # noqa: UP036 - a checkout is run without pip, which would refuse
    raise ImportError(
        f"agentrl needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. "
        "Make an environment with a newer one: python3.11 -m venv .venv"
    )

# OpenMP reads these when torch loads it. By default its threads spin while they wait, and take cores from each other.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    if "torch" in sys.modules and os.environ.get("OMP_NUM_THREADS") != "1":
        warnings.warn(
            "torch was imported before agentrl: its threads spin while they wait, which on a busy machine makes a run "
            "several times slower. Import agentrl first, or set OMP_WAIT_POLICY=PASSIVE before Python starts",
            RuntimeWarning,
            stacklevel=2,
        )

if TYPE_CHECKING:
    from agentrl.train import train as train
    from agentrl.train import training as training

    run_training = train
else:

    def __getattr__(name: str) -> object:
        """Import `run_training`, `train` and `training` on first use: code that only needs a part of the package, e.g.
        a tool, must not wait for the config's libraries."""
        if name not in ("run_training", "train", "training"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module = importlib.import_module("agentrl.train")
        if name == "run_training":
            return module.train
        return module if name == "train" else module.training  # the module is called as the function: see there
