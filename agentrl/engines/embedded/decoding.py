"""Decoding as one program over buffers whose addresses never change: on a GPU, a graph that is captured and replayed.

A program has room for R requests of up to P pages. One copy from the host fills its table; a row without a request
reads and writes the spare page. The token that a step samples is the next step's input where it lies, so that the host
launches a step before it reads the results of the step before. A request that has ended in the meantime has sampled one
token too many, which is not recorded or counted.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from agentrl.engines.embedded.cache import CacheFull
from agentrl.engines.embedded.paged_attention import AttendPages, TokenPages, attend_pages, pages_of
from agentrl.engines.embedded.pages import PAGE, SPARE, PagedRows, PagePool
from agentrl.engines.embedded.request import Request
from agentrl.engines.embedded.sampling import sample_rows, uniforms_on_device
from agentrl.model.attend import Rule
from agentrl.model.attention import Mixer
from agentrl.model.head_product import head_of
from agentrl.model.packed import forward_packed

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

logger = logging.getLogger(__name__)

Sampled = tuple[list[Request], list[int], list[float]]
"""Requests of a step, the token that was sampled for each, and the token's log-prob."""

# Columns of a program's table [R, _PAGES + P] int64. _TEMPERATURE and _TOP_P hold the bits of a float64.
_ID, _COLUMN, _PROMPT, _PROMPT_PAGES, _SHIFT, _SEED, _GREEDY, _TOP_K, _TEMPERATURE, _TOP_P, _PAGES = range(11)
_SAMPLED = -1
"""An id: the token that the step before has sampled."""


class _DecodingAttention:
    """Implements `AttentionLayout` for one token of each row of a program."""

    def __init__(self, pool: PagePool, attend: AttendPages, tokens: TokenPages, cells: torch.Tensor) -> None:
        """`cells` [R] int64: where the keys and values of the tokens are stored."""
        self._pool, self._attend, self._tokens, self._cells = pool, attend, tokens, cells

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule
    ) -> torch.Tensor:
        """Store the new keys and values and attend: query [H, R, D], key and value [K, R, D] -> [R, H, D]."""
        self._pool.write(layer, self._cells, key, value)
        return attend_pages(self._attend, self._pool, layer, self._tokens, query, rule)

    def mix(self, mixer: Mixer, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("models with mixers that have a state keep it in rows, not in pages")


class DecodingProgram:
    """One step of decoding over fixed buffers. A graph of it, once captured, is run in its place."""

    def __init__(
        self,
        model: PreTrainedModel,
        pool: PagePool,
        attend: AttendPages,
        rows: int,
        pages: int,
        likeliest: bool,
    ) -> None:
        """`rows` R, `pages` P. likeliest: some requests sample from the likeliest tokens alone."""
        self._model, self._pool, self._attend, self._likeliest = model, pool, attend, likeliest
        self._head = head_of(model)
        device = pool.device
        self.rows, self.pages = rows, pages
        self.table = torch.zeros(rows, _PAGES + pages, dtype=torch.int64, device=device)
        self.table.copy_(torch.from_numpy(empty_table(rows, pages)))
        self.tokens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.logprobs = torch.zeros(rows, dtype=torch.float32, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> None:
        """Sample a token for each row of the table."""
        if self._graph is None:
            self.compute()
        else:
            self._graph.replay()

    def compute(self) -> None:
        """Launch the operations of a step one by one."""
        table, pages = self.table, self.table[:, _PAGES:]
        prompt, column, prompt_pages = table[:, _PROMPT], table[:, _COLUMN], table[:, _PROMPT_PAGES]
        ids = torch.where(table[:, _ID] == _SAMPLED, self.tokens, table[:, _ID])
        tokens = TokenPages(pages, prompt_pages, prompt, column)
        attention = _DecodingAttention(self._pool, self._attend, tokens, tokens.cells(prompt_pages))
        place = prompt + column
        logits = self._head(forward_packed(self._model, ids, place + table[:, _SHIFT], attention))
        floats = table.view(torch.float64)
        sampled, logprobs = sample_rows(
            logits,
            uniforms_on_device(table[:, _SEED], place + 1)[:, None],
            floats[:, _TEMPERATURE, None].float(),
            table[:, _GREEDY] != 0,
            (floats[:, _TOP_P, None], table[:, _TOP_K, None]) if self._likeliest else None,
        )
        self.tokens.copy_(sampled)
        self.logprobs.copy_(logprobs)

    def capture(self, memory: _POOL_HANDLE) -> None:
        """Capture the step as a graph, in memory that all graphs of the device share."""
        stream = torch.cuda.Stream(self.table.device)
        stream.wait_stream(torch.cuda.current_stream(self.table.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles kernels, and lets libraries take their working memory
                self.compute()
        torch.cuda.current_stream(self.table.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=memory):
            self.compute()
        self._graph = graph


def empty_table(rows: int, pages: int) -> npt.NDArray[np.int64]:
    """Make the table of a program without requests."""
    table = np.full((rows, _PAGES + pages), SPARE, dtype=np.int64)
    table[:, :_PAGES] = 0
    table.view(np.float64)[:, [_TEMPERATURE, _TOP_P]] = 1.0
    return table


@dataclass(slots=True)
class _Launched:
    """A step whose results may not be there yet."""

    requests: list[tuple[int, Request]]
    """(row, request)"""
    tokens: torch.Tensor
    logprobs: torch.Tensor
    done: torch.cuda.Event | None

    def read(self) -> Sampled:
        """Wait for the results, and leave out requests that have ended since the launch."""
        if self.done is not None:
            self.done.synchronize()
        tokens, logprobs = self.tokens.tolist(), self.logprobs.tolist()
        live = [(row, request) for row, request in self.requests if not request.future.done()]
        for _, request in live:
            request.session.cached = len(request.session.ids)
        return [r for _, r in live], [tokens[row] for row, _ in live], [logprobs[row] for row, _ in live]


class _Batch:
    """Requests that decode in the rows of a program."""

    def __init__(
        self, program: DecodingProgram, requests: Sequence[Request], own: PagedRows, shared: PagedRows
    ) -> None:
        self.program, self._own = program, own
        self._live = dict(enumerate(requests))
        self.members = frozenset(requests)
        self.table = empty_table(program.rows, program.pages)
        pages, of_prompt = pages_of([r.session for r in requests], own, shared, program.pages)
        floats = self.table.view(np.float64)
        for row, (request, count) in enumerate(zip(requests, of_prompt, strict=True)):
            session, params = request.session, request.params
            # A seed's lowest 64 bits, as a signed number.
            seed = ((request.seed & 0xFFFFFFFFFFFFFFFF) ^ (1 << 63)) - (1 << 63)
            self.table[row, :_TEMPERATURE] = (
                session.ids[-1],
                session.held,
                session.prompt_length,
                count,
                session.shift,
                seed,
                params.temperature == 0,
                params.top_k if params.temperature else 0,
            )
            floats[row, _TEMPERATURE] = params.temperature or 1.0
            floats[row, _TOP_P] = params.top_p if params.temperature else 1.0
            self.table[row, _PAGES:] = pages[row]
        cuda = program.table.is_cuda
        self._sent = [torch.zeros(self.table.shape, dtype=torch.int64, pin_memory=cuda) for _ in range(2)]
        self._results = [
            (torch.zeros(program.rows, dtype=torch.int64, pin_memory=cuda), torch.zeros(program.rows, pin_memory=cuda))
            for _ in range(2)
        ]
        self._turn = 0

    def goes_on(self, running: Sequence[Request]) -> bool:
        """Prepare a launch before the results of the last one are read. False where there is none to make.

        Rows whose requests have left, or end with the token that is on its way, are emptied.
        """
        left = {id(request) for request in running}
        for row, request in list(self._live.items()):
            if id(request) not in left or len(request.logprobs) + 1 >= request.params.max_new_tokens:
                del self._live[row]
                self.table[row] = empty_table(1, self.program.pages)[0]
        if not self._live or 2 * len(self._live) <= self.program.rows:  # a smaller program suffices
            return False
        moves = self._own.pool.moves
        begun = [row for row in self._live if self.table[row, _COLUMN] % PAGE == 0]
        if begun:
            try:
                self._own.extend(
                    [self._live[row].session for row in begun], [int(self.table[row, _COLUMN]) + 1 for row in begun]
                )
            except CacheFull:
                return False
        for row in begun:
            pages = self._own.pages(self._live[row].session.row)
            first = int(self.table[row, _PROMPT_PAGES])
            if first + len(pages) > self.program.pages:
                return False
            self.table[row, _PAGES + first : _PAGES + first + len(pages)] = pages
        return moves == self._own.pool.moves

    def launch(self) -> _Launched:
        """Launch a step of all rows, and advance the table to the next."""
        self._turn ^= 1  # what the step before sends and receives may still be on its way
        sent, (tokens, logprobs) = self._sent[self._turn], self._results[self._turn]
        sent.copy_(torch.from_numpy(self.table))
        program = self.program
        program.table.copy_(sent, non_blocking=True)
        program.run()
        tokens.copy_(program.tokens, non_blocking=True)
        logprobs.copy_(program.logprobs, non_blocking=True)
        done = None
        if program.table.is_cuda:
            done = torch.cuda.Event()
            done.record()
        rows = list(self._live)
        self.table[rows, _ID] = _SAMPLED
        self.table[rows, _COLUMN] += 1
        return _Launched(list(self._live.items()), tokens, logprobs, done)


class Decoder:
    """Runs the steps in which all running requests decode, over keys and values in pages."""

    def __init__(
        self, model: PreTrainedModel, own: PagedRows, shared: PagedRows, attend: AttendPages, pages: int | None
    ) -> None:
        """`pages`: P of all programs; None: as many as the requests need, which for copies of pages is less work."""
        self._model, self._own, self._shared, self._attend, self._pages = model, own, shared, attend, pages
        self._programs: dict[tuple[int, int, bool], DecodingProgram] = {}
        self._moves = 0
        self._captures = own.device.type == "cuda"
        self._memory: _POOL_HANDLE | None = None
        self._batch: _Batch | None = None
        self._ahead: _Launched | None = None

    def step(self, running: Sequence[Request]) -> Sampled | None:
        """Run a step, or return the results of the step that was launched ahead.

        None where none is on its way and some request has more to compute than the token that it sampled last.
        """
        launched, self._ahead = self._ahead, None
        if launched is None:
            if not all(decodes(request) for request in running):
                return None
            self._batch = self._begin(running)
            launched = self._batch.launch()
        batch = self._batch
        if batch is not None and batch.members.issuperset(running) and batch.goes_on(running):
            self._ahead = batch.launch()
        return launched.read()

    def settle(self) -> Sampled | None:
        """Return the results of the step that was launched ahead, if any."""
        launched, self._ahead = self._ahead, None
        return None if launched is None else launched.read()

    def drop(self) -> None:
        """Free the programs' memory, and forget a step that was launched ahead."""
        self._programs.clear()
        self._batch = self._ahead = self._memory = None

    def _begin(self, running: Sequence[Request]) -> _Batch:
        sessions = [request.session for request in running]
        self._own.extend(sessions, [session.held + 1 for session in sessions])
        pages = self._pages or _bucket(len(pages_of(sessions, self._own, self._shared)[0][0]))  # of equal length
        likeliest = any(r.params.temperature and (r.params.top_p < 1 or r.params.top_k > 0) for r in running)
        program = self._program(_bucket(len(running)), pages, likeliest)
        return _Batch(program, running, self._own, self._shared)

    def _program(self, rows: int, pages: int, likeliest: bool) -> DecodingProgram:
        """Make the program of a bucket, or look it up."""
        pool = self._own.pool
        if self._moves != pool.moves:
            self.drop()
            self._moves = pool.moves
        key = rows, pages, likeliest
        if key not in self._programs:
            program = DecodingProgram(self._model, pool, self._attend, rows, pages, likeliest)
            if self._captures:
                self._capture(program)
            self._programs[key] = program
        return self._programs[key]

    def _capture(self, program: DecodingProgram) -> None:
        """Capture a program; where that fails, all programs run as they are from now on."""
        try:
            self._memory = self._memory or torch.cuda.graph_pool_handle()
            program.capture(self._memory)
        except Exception as error:  # of the driver, of torch, or of the model's own code
            self._captures = False
            logger.warning(
                "%s: a step of decoding cannot be captured as a graph, and runs operation by operation: %s",
                type(self._model).__name__,
                str(error).partition("\n")[0],
            )


def decodes(request: Request) -> bool:
    """Check whether all that a request has to compute is the token that it sampled last."""
    session = request.session
    ready = session.prefix is not None and session.prefix.ready and session.cached >= session.prompt_length
    return ready and request.new_tokens == 1


def _bucket(count: int) -> int:
    """Round up to a power of two."""
    return 1 << (count - 1).bit_length()
