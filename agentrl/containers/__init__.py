"""Containers in which agents act: their contract, an OCI command line, a pool, the files that go in and out."""
