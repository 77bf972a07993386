"""Experiments: trainings, simulations and faults that answer a question; `labs/README.md` lists them."""

import agentrl  # noqa: F401 - before torch, whose threads would spin otherwise
