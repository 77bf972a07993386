"""Data sets: parquet rows as samples, in the order of a run."""
