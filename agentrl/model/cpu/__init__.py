"""Packed sequences on a CPU: common beginnings are stored once and attended to as a prefix tree."""
