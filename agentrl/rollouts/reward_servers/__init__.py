"""Servers of a generative reward model: their processes on one machine, on Ray's machines, and their opening."""
