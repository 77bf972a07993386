"""Attention to keys and values in pages (`agentrl.engines.embedded.pages`), for tokens of any sessions at once.

A token reads the pages of its prompt and then the pages of its session. Own tokens begin on a page of their own, so
that sessions share all pages of a prompt and copy no page.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn.attention.flex_attention import BlockMask

from agentrl.engines.embedded.cache import Memory, Places, Session
from agentrl.engines.embedded.pages import EMPTY, PAGE, PagedRows, PagePool
from agentrl.model.attend import Rule, attend_part, sink_share
from agentrl.model.attention import Flex, attend_flex_rows, compiled_flex

logger = logging.getLogger(__name__)


class TokenPages:
    """The pages that each of T tokens reads, and the places of them that it sees, in one step."""

    def __init__(
        self, pages: torch.Tensor, prompt_pages: torch.Tensor, prompt: torch.Tensor, columns: torch.Tensor
    ) -> None:
        """`pages` [T, P] int64: of the prompt, of the session, then any. `prompt_pages` [T]: number of the first ones.
        `prompt` [T]: tokens of the prompt. `columns` [T]: the token's place among the session's own tokens.
        """
        self.pages, self.columns = pages, columns
        number = torch.arange(pages.shape[1], device=pages.device)
        own = number - prompt_pages[:, None]
        self.first = torch.where(own < 0, number * PAGE, prompt[:, None] + own * PAGE)
        """[T, P]: the place in the sequence of each page's first token."""
        self.end = torch.where(own < 0, prompt[:, None], self.first + PAGE)
        """[T, P]: the first place in the sequence that is not on the page; a prompt's last page is part-filled."""
        self.last = prompt + columns
        """[T]: the token's own place, after which it sees nothing."""
        self._masks: dict[int | None, torch.Tensor] = {}
        self._blocks: dict[int | None, BlockMask] = {}

    def cells(self, prompt_pages: torch.Tensor) -> torch.Tensor:
        """Find the cell of each token's own keys among all cells of the pool: [T] int64."""
        page = self.pages.gather(1, (prompt_pages + self.columns // PAGE)[:, None])[:, 0]
        return page * PAGE + self.columns % PAGE

    def mask(self, window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Build, or look up, the additive mask [T, 1, 1, P * PAGE] of all places on the pages."""
        if window not in self._masks:
            place = self.first[:, :, None] + torch.arange(PAGE, device=self.first.device)
            seen = (place < self.end[:, :, None]) & (place <= self.last[:, None, None])
            if window is not None:
                seen &= place > (self.last - window)[:, None, None]
            lowest = torch.finfo(dtype).min / 2  # finite: attention to no key at all must not give NaN
            mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, lowest)
            self._masks[window] = mask.flatten(1)[:, None, None]
        return self._masks[window]

    def blocks(self, window: int | None, count: int, groups: int) -> BlockMask:
        """Build, or look up, the mask of `groups` queries a token over a pool of `count` pages.

        Places are kept by page, as they are equal for all tokens that read it.
        """
        if window not in self._blocks:
            pages, last = self.pages.flatten(), self.last
            first, end = (torch.zeros(count, dtype=torch.int64, device=pages.device) for _ in range(2))
            first.scatter_(0, pages, self.first.flatten())
            end.scatter_(0, pages, self.end.flatten())

            def seen(token: torch.Tensor, head: torch.Tensor, query: torch.Tensor, cell: torch.Tensor) -> torch.Tensor:
                """Decide by cell if a token may see it: scalars int64 (flex attention maps them) -> scalar bool."""
                page = cell // PAGE
                place = first[page] + cell % PAGE
                inside = (place < end[page]) & (place <= last[token])
                return inside if window is None else inside & (place > last[token] - window)

            used = (self.first <= self.last[:, None]).sum(1, dtype=torch.int32)
            self._blocks[window] = BlockMask.from_kv_blocks(
                used[:, None, None],
                self.pages.int()[:, None, None],
                BLOCK_SIZE=PAGE,
                mask_mod=seen,
                seq_lengths=(groups, count * PAGE),
                compute_q_blocks=False,
            )
        return self._blocks[window]


AttendPages = Callable[[PagePool, int, TokenPages, torch.Tensor, Rule], torch.Tensor]
"""Attends with T tokens in a layer: query [T, K, G, D] -> [T, K, G, D]."""


def attend_copies(pool: PagePool, layer: int, tokens: TokenPages, query: torch.Tensor, rule: Rule) -> torch.Tensor:
    """Attend to copies of the pages, on any device. See `AttendPages`."""
    key, value = (
        tensor[tokens.pages].flatten(1, 2).transpose(1, 2) for tensor in (pool.keys[layer], pool.values[layer])
    )
    out, lse = attend_part(query, key, value, tokens.mask(rule.window, query.dtype), rule)
    if rule.sinks is None:
        return out
    return out * sink_share(lse, rule.sinks.view(query.shape[1:3]))[..., None].to(out.dtype)


def attend_in_place(
    pool: PagePool, layer: int, tokens: TokenPages, query: torch.Tensor, rule: Rule, *, flex: Flex
) -> torch.Tensor:
    """Attend to the pages where they lie, with a compiled flex attention. See `AttendPages`."""
    key, value = (tensor.flatten(0, 1).transpose(0, 1)[None] for tensor in (pool.keys[layer], pool.values[layer]))
    blocks = tokens.blocks(rule.window, pool.count, query.shape[2])
    return attend_flex_rows(query, key, value, rule, blocks, flex)


class PagedTokens:
    """Attention of sessions that extend their cache by a few tokens each; every token reads its pages by itself."""

    def __init__(self, sessions: Sequence[Session], own: PagedRows, shared: PagedRows, attend: AttendPages) -> None:
        self.sessions, self.pool = sessions, own.pool
        self._attend = attend
        own.extend(sessions, [len(session.ids) - session.prompt_length for session in sessions])
        owners = [(s, column) for s in sessions for column in range(s.held, len(s.ids) - s.prompt_length)]
        self.size = len(owners)
        pages, of_prompt = pages_of([session for session, _ in owners], own, shared)
        numbers = [
            (s.prompt_length, column, s.shift, count) for (s, column), count in zip(owners, of_prompt, strict=True)
        ]
        prompt, columns, shift, prompt_pages = torch.tensor(numbers, device=own.device).unbind(1)
        table = torch.tensor(pages, device=own.device)
        self._tokens = TokenPages(table, prompt_pages, prompt, columns)
        self.places: Places = (self._tokens.cells(prompt_pages),)
        self.positions = prompt + columns + shift

    def attend(self, layer: int, query: torch.Tensor, rule: Rule) -> torch.Tensor:
        """Attend to own pages and prompts': query [H, T, D] -> [T, H, D]. Keys of the new tokens are stored already."""
        return attend_pages(self._attend, self.pool, layer, self._tokens, query, rule)


def pages_of(
    sessions: Sequence[Session], own: PagedRows, shared: PagedRows, width: int = 0
) -> tuple[list[list[int]], list[int]]:
    """List the pages of each session, prompt first, filled up to equal length; and how many are the prompt's."""
    found, of_prompt = [], []
    for session in sessions:
        assert session.prefix is not None
        pages = shared.pages(session.prefix.row)
        of_prompt.append(len(pages))
        found.append([*pages, *own.pages(session.row)])
    width = max(width, *map(len, found))
    return [[*pages, *[EMPTY] * (width - len(pages))] for pages in found], of_prompt


def attend_pages(
    attend: AttendPages, pool: PagePool, layer: int, tokens: TokenPages, query: torch.Tensor, rule: Rule
) -> torch.Tensor:
    """Attend with T tokens in a layer: query [H, T, D] -> [T, H, D]."""
    heads = pool.keys[layer].shape[2]
    return attend(pool, layer, tokens, query.unflatten(0, (heads, -1)).permute(2, 0, 1, 3), rule).flatten(1, 2)


def kernel_for(pool: PagePool) -> AttendPages:
    """Choose how to attend to a pool's pages: in place where flex attention is compiled for its device and heads."""
    if pool.device.type != "cuda" or not all(16 <= width <= 256 for width in pool.widths):
        return attend_copies
    in_place = partial(attend_in_place, flex=compiled_flex())
    return in_place if agrees(in_place, pool) else attend_copies


@torch.inference_mode()
def agrees(attend: AttendPages, like: PagePool) -> bool:
    """Try a way to attend on a few pages with the heads of a pool. Warn where it fails or differs from copies."""
    device, dtype = like.device, like.dtype
    shape = next(shape for shape in like.shapes if shape[0])
    pool = PagePool([shape], dtype, device, Memory(1 << 40))
    pool.take(5)
    generator = torch.Generator().manual_seed(0)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    numbers = torch.tensor(
        [[2, 130, 5], [2, 130, 200], [1, 7, 0]], device=device
    )  # pages and tokens of prompts, places
    tokens = TokenPages(torch.tensor([[2, 3, 4, 0], [2, 3, 5, 6], [4, 5, 0, 0]], device=device), *numbers.unbind(1))
    query = torch.randn(3, shape[0], 2, shape[1], generator=generator).to(device, dtype)
    rule = Rule(shape[1] ** -0.5)
    expected = attend_copies(pool, 0, tokens, query, rule).float()
    try:
        difference = float((attend(pool, 0, tokens, query, rule).float() - expected).abs().max())
    except Exception as error:  # the compiler's errors have no common class
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    else:
        if difference <= (1e-3 if dtype == torch.float32 else 0.03):  # Written so that NaN fails, too.
            return True
        why = f"its results differ by {difference:.2g}"
    logger.warning("flex attention over pages is left out, which are copied together instead: %s", why)
    return False
