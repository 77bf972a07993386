"""Collection in Milvus in the place of an index: for corpora beyond one machine.

A YAML file names the server, the collection and its fields. Words are searched by Milvus' own BM25, vectors with the
queries embedded here. The client is the same for a cluster and for Milvus Lite (`milvus-lite server`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
import pydantic

from agentrl.errors import ConfigError, DataError, UserError, install_extra
from tools.retriever.embed import Embedder, EmbeddingSpec
from tools.retriever.index import Found, Mode, Query

if TYPE_CHECKING:
    from pymilvus import MilvusClient

T = TypeVar("T")

TIMEOUT = 30.0
"""Seconds of one request to Milvus, which may hold a batch of queries."""
INSERTED_TOGETHER = 256
LONGEST_CONTENTS = 65_535
"""Bytes of a text field."""
_LONGEST_ID = 512
_NOT_LOADED = 101
"""Milvus' code for a collection that lies on the disk only: Milvus Lite forgets at a restart that it was loaded."""
_FUSED = 50
_K = 60
"""Constant of reciprocal rank fusion, as in `tools.retriever.fusion`."""


class EngineUnavailable(UserError):
    """Milvus cannot be reached, or does not answer as it should."""


class CollectionSpec(pydantic.BaseModel):
    """Contents of the YAML file."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    uri: str = pydantic.Field(pattern=r"^https?://[^/@]+/?$")
    """Server, e.g. http://127.0.0.1:19530; https for TLS."""
    collection: str
    database: str = ""
    """Database; empty: the default one."""
    token_variable: str | None = None
    """Environment variable that holds `user:password` or a key. It is not written anywhere."""
    id: str = "id"
    """Field of the documents' ids."""
    contents: str = "contents"
    """Field of the documents' texts, `"Title"\\ntext`."""
    words: str | None = "words"
    """Field that a BM25 function of the collection fills from the texts; null: no search by words."""
    vector: str | None = None
    """Field of the documents' vectors; null: no search by vectors."""
    embedding: EmbeddingSpec | None = None
    """Model that made the vectors."""

    @pydantic.model_validator(mode="after")
    def _searchable(self) -> CollectionSpec:
        if (self.vector is None) != (self.embedding is None):
            raise ValueError("vector and embedding go together: give both or none")
        if not self.words and not self.vector:
            raise ValueError("give the field of the words, of the vectors, or both")
        return self


def is_collection(path: Path) -> bool:
    """Check whether a path names a collection instead of an index's folder."""
    return path.suffix in (".yaml", ".yml")


def read_spec(path: Path) -> CollectionSpec:
    """Read the YAML file. Raises ConfigError naming file and key."""
    import yaml

    from agentrl.system.bounded_yaml import load_yaml

    try:
        return CollectionSpec.model_validate(load_yaml(path.read_text(encoding="utf-8")))
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        raise ConfigError(": ".join([str(path), *map(str, problem["loc"]), problem["msg"]])) from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


class Collection:
    """Collection that a file names, whether it is there or not."""

    def __init__(self, path: Path) -> None:
        """Connect to Milvus. Raises ConfigError, EngineUnavailable."""
        self.path, self.spec = path, read_spec(path)
        token = ""
        if self.spec.token_variable:
            token = os.environ.get(self.spec.token_variable, "")
            if not token:
                raise ConfigError(f"{path}: token_variable: {self.spec.token_variable} is not set in the environment")
        self._client = self._connected(token)

    def _connected(self, token: str) -> MilvusClient:
        try:
            from pymilvus import MilvusClient
        except ModuleNotFoundError as error:
            raise ConfigError(f"{self.path}: Milvus needs pymilvus: {install_extra('milvus')}") from error
        logging.getLogger("pymilvus").setLevel(logging.CRITICAL)  # it logs, with its stack, what it raises
        return self._asked(
            lambda: MilvusClient(uri=self.spec.uri, token=token, db_name=self.spec.database, timeout=TIMEOUT)
        )

    def ask(self, call: str, **arguments: Any) -> Any:
        """Call a method of the client for this collection. Raises EngineUnavailable; the next call connects again."""
        return self._asked(lambda: getattr(self._client, call)(self.spec.collection, timeout=TIMEOUT, **arguments))

    def _asked(self, request: Callable[[], T]) -> T:
        import grpc
        from pymilvus import MilvusException

        try:
            try:
                return request()
            except MilvusException as error:
                if error.code != _NOT_LOADED:
                    raise
            self._client.load_collection(self.spec.collection, timeout=TIMEOUT)
            return request()
        except (MilvusException, grpc.RpcError) as error:
            said = error.message if isinstance(error, MilvusException) else f"{error.code().name}: {error.details()}"
            raise EngineUnavailable(f"{self.path}: Milvus at {self.spec.uri}: {said}") from error

    def create(self, dimensions: int | None) -> None:
        """Make the collection with the spec's fields. Raises ConfigError when there is one of that name."""
        from pymilvus import DataType, Function, FunctionType

        spec, client = self.spec, self._client
        if self.ask("has_collection"):
            raise ConfigError(f"{self.path}: {spec.uri} has the collection {spec.collection} already: use `add`")
        schema, indexes = client.create_schema(auto_id=True), client.prepare_index_params()
        schema.add_field("row", DataType.INT64, is_primary=True)
        schema.add_field(spec.id, DataType.VARCHAR, max_length=_LONGEST_ID)
        schema.add_field(spec.contents, DataType.VARCHAR, max_length=LONGEST_CONTENTS, enable_analyzer=bool(spec.words))
        if spec.words:
            schema.add_field(spec.words, DataType.SPARSE_FLOAT_VECTOR)
            schema.add_function(Function("bm25", FunctionType.BM25, [spec.contents], [spec.words]))
            indexes.add_index(spec.words, index_type="SPARSE_INVERTED_INDEX", metric_type="BM25")
        if spec.vector:
            schema.add_field(spec.vector, DataType.FLOAT_VECTOR, dim=dimensions)
            indexes.add_index(spec.vector, index_type="AUTOINDEX", metric_type="IP")
        self.ask("create_collection", schema=schema, index_params=indexes)

    def insert(self, documents: Iterator[tuple[str | None, str]], embedder: Embedder | None) -> int:
        """Insert documents and return how many there were. A document without an id gets its number.

        Raises DataError for one that is too long.
        """
        spec, done = self.spec, 0
        while together := list(islice(documents, INSERTED_TOGETHER)):
            rows: list[dict[str, Any]] = []
            for identity, contents in together:
                name = str(done + len(rows)) if identity is None else identity
                for what, text, most in (("id", name, _LONGEST_ID), ("text", contents, LONGEST_CONTENTS)):
                    if len(text.encode()) > most:
                        raise DataError(f"document {name:.80}: Milvus takes {most:,} bytes of {what} at most; split it")
                rows.append({spec.id: name, spec.contents: contents})
            if embedder and spec.vector:
                for row, vector in zip(rows, embedder.passages([text for _, text in together]), strict=True):
                    row[spec.vector] = vector.tolist()
            self.ask("insert", data=rows)
            done += len(rows)
        return done


class MilvusIndex:
    """Search over a collection."""

    generation = 0

    def __init__(self, collection: Collection) -> None:
        """Check the collection. Raises ConfigError when it is not as the file says."""
        spec = collection.spec
        self._collection, self._spec = collection, spec
        self._embedder: Embedder | None = None
        self.modes: Sequence[Mode] = (
            ("hybrid", "lexical", "dense") if spec.words and spec.vector else ("lexical",) if spec.words else ("dense",)
        )
        if not collection.ask("has_collection"):
            raise ConfigError(
                f"{collection.path}: {spec.uri} has no collection {spec.collection}: make it with `index`"
            )
        self._fields = {field["name"]: field for field in collection.ask("describe_collection")["fields"]}
        for key in ("id", "contents", "words", "vector"):
            name = getattr(spec, key)
            if name and name not in self._fields:
                raise ConfigError(
                    f"{collection.path}: {key}: the collection {spec.collection} has no field {name!r}, "
                    f"but {', '.join(self._fields)}"
                )
        self._documents = self._count()

    @classmethod
    def open(cls, path: Path) -> MilvusIndex:
        """Connect to the collection of a file. Raises ConfigError, EngineUnavailable."""
        return cls(Collection(path))

    def _count(self) -> int:
        return int(self._collection.ask("get_collection_stats")["row_count"])

    def __len__(self) -> int:
        return self._documents

    def newest(self) -> MilvusIndex:
        self._documents = self._count()
        return self

    def load_embedder(self) -> None:
        assert self._spec.embedding is not None and self._spec.vector is not None
        self._embedder = Embedder(self._spec.embedding)
        found, expected = self._embedder.dimensions, self._fields[self._spec.vector]["params"].get("dim")
        if found != expected:
            raise ConfigError(
                f"{self._collection.path}: embedding: the vectors of {self._spec.embedding.model} have {found} "
                f"numbers, those in the field {self._spec.vector} have {expected}: it is another model"
            )

    def find(self, queries: Sequence[Query], mode: Mode) -> Iterator[list[Found]]:
        """Search all queries in one request to Milvus. A query without a letter or digit finds nothing."""
        asked = [query for query in queries if any(map(str.isalnum, query[0]))]
        answers = iter(self._search([text for text, _ in asked], mode, max(topk for _, topk in asked)) if asked else [])
        spec = self._spec
        for text, topk in queries:
            if not any(map(str.isalnum, text)):
                yield []
                continue
            hits = [(hit["entity"], hit["distance"]) for hit in next(answers)[:topk]]
            # BM25's numbers are positive in Milvus, and their negatives in Milvus Lite.
            yield [
                Found(
                    orjson.dumps({"id": str(entity[spec.id]), "contents": str(entity[spec.contents])}),
                    abs(float(score)) if mode == "lexical" else float(score),
                )
                for entity, score in hits
            ]

    def _search(self, texts: list[str], mode: Mode, topk: int) -> Any:
        spec, ask = self._spec, self._collection.ask
        wanted = {"limit": topk, "output_fields": [spec.id, spec.contents]}
        if mode == "lexical":
            return ask("search", data=texts, anns_field=spec.words, **wanted)
        assert self._embedder is not None
        vectors = self._embedder.queries(texts).tolist()
        if mode == "dense":
            return ask("search", data=vectors, anns_field=spec.vector, **wanted)
        from pymilvus import AnnSearchRequest, RRFRanker

        depth = max(_FUSED, topk)
        requests = [
            AnnSearchRequest(data=data, anns_field=field, param={}, limit=depth)
            for data, field in ((texts, spec.words), (vectors, spec.vector))
        ]
        return ask("hybrid_search", reqs=requests, ranker=RRFRanker(_K), **wanted)
