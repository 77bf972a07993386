"""Settings that a server is started with."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic


class Settings(pydantic.BaseModel):
    """Settings of all workers alike."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    index: Path
    """Folder of the index, or the YAML file of a collection in Milvus."""
    host: str = "127.0.0.1"
    """Address to listen at. There is no authentication: beyond loopback only in a network that you trust."""
    port: int = pydantic.Field(8000, ge=0, le=65535)
    """Port to listen at; 0: any free one, which is printed."""
    workers: int = pydantic.Field(1, gt=0)
    """Worker processes. They share the index's pages."""
    threads: int = pydantic.Field(2, gt=0)
    """Search threads of a worker."""
    mode: Literal["auto", "lexical", "dense", "hybrid"] = "auto"
    """Search by words, by vectors, or both fused; auto: both where the index has vectors, else by words."""
    topk: int = pydantic.Field(3, gt=0)
    """Documents a query when a request does not say."""
    max_topk: int = pydantic.Field(100, gt=0)
    """Documents a query at most."""
    max_queries: int = pydantic.Field(4096, gt=0)
    """Queries of one request at most."""
    max_query_chars: int = pydantic.Field(8192, gt=0)
    """Characters of one query at most."""
    max_pending: int = pydantic.Field(16384, gt=0)
    """Queries that wait, by worker. Beyond that a request is answered 429 with Retry-After."""

    @pydantic.model_validator(mode="after")
    def _fitting(self) -> Settings:
        if self.topk > self.max_topk:
            raise ValueError(f"topk is {self.topk}, more than max_topk = {self.max_topk}")
        if self.max_queries > self.max_pending:
            raise ValueError(f"max_queries is {self.max_queries}, more than max_pending = {self.max_pending}")
        return self

    @property
    def max_body(self) -> int:
        """Bytes of a request at most."""
        return min(32 << 20, 1024 + self.max_queries * (6 * self.max_query_chars + 4))
