"""Benchmarks that others publish: their rows, their scores, a report of a model, and two reports in one table."""
