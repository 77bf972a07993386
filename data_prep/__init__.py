"""Preparation of raw data as parquet in the row schema: `python -m data_prep.<name> --out DIR`. Imports no torch."""
