"""Parquet rows in, samples out."""
