"""Raw data to parquet in the row schema: `python -m data_prep.<name> --out DIR`. Imports no torch."""
