"""Ranks of a process group: meshes, sharding, tensor parallelism, offloading."""
