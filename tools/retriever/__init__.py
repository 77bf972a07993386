"""Search server beside the training: an index on disk that several processes map, and Search-R1's `/retrieve`.

`python -m tools.retriever index CORPUS.jsonl OUT`, `add CORPUS.jsonl INDEX` and `serve INDEX`.
"""
