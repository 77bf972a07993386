"""Measurements that pages show, each with what it is compared with."""

import agentrl  # noqa: F401 - before torch, whose threads would spin otherwise
