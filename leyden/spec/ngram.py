"""Drafts from the text itself: what followed the last few tokens where they stood before (prompt lookup decoding).

The longest n-gram at the end of the text, of `least` to `most` tokens, is looked up in all that is before it; of
several places the last counts. What followed there is proposed, and where that reaches the end of the text it goes on
with what it proposed itself, so that a text that repeats itself is continued for as long as wanted.

The text is kept by pages, like keys: a cached prefix is known to whoever finds it. A page of which a sequence was given
a part alone, or that came back from the host's memory, may hold another text: drafts from there are wrong.
"""

import torch
from torch import Tensor

from leyden.spec.drafter import Draft, Heads, Pick, Seen

_ENTRIES = 2**24  # tokens that are searched at a time


class NGram:
    taps: tuple[int, ...] = ()
    lookahead = 1  # the newest token itself is noted
    steady = True

    def __init__(self, width: int, least: int, most: int):
        self.width, self._least, self._most = width, least, most
        self._text = torch.empty(0)  # int32 [pages, page]

    def observe(self, seen: Seen) -> None:
        ctx = seen.ctx
        assert ctx.pool is not None
        if not len(self._text):
            shape = ctx.pool.shape
            self._text = torch.zeros(shape.pages, shape.page, dtype=torch.int32, device=seen.tokens.device)
        for span, rows, _ in ctx.parts():
            assert rows.pages is not None
            lens = rows.starts.diff()
            owner = torch.arange(len(lens), device=lens.device).repeat_interleave(lens, output_size=rows.tokens)
            self._note(rows.pages, owner, ctx.positions[span], seen.tokens[span])

    def draft(self, heads: Heads, count: int, pick: Pick) -> Draft:
        owner = torch.arange(len(heads.slots), device=heads.slots.device)
        self._note(heads.pages, owner, heads.positions, heads.anchors)
        part = max(1, _ENTRIES // (heads.pages.shape[1] * self._text.shape[1]))
        pieces = zip(heads.pages.split(part), heads.positions.split(part), strict=True)
        found = [
            look_up(self._text[pages].flatten(1), positions + 1, count, self._least, self._most)
            for pages, positions in pieces
        ]
        return Draft(torch.cat(found))

    def _note(self, pages: Tensor, owner: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Write n tokens to their positions; pages int32 [R, P], and owner int64 [n]: the sequence of each token."""
        page = self._text.shape[1]
        self._text[pages[owner, positions // page], positions % page] = tokens.int()


def look_up(text: Tensor, lengths: Tensor, count: int, least: int, most: int) -> Tensor:
    """`count` tokens that may follow each text, int64 [R, count]; -1 where its end did not occur before.

    text int32 [R, C], lengths int [R]: how much of it counts.
    """
    size, lengths = text.shape[1], lengths.long()
    places = torch.arange(size, dtype=torch.int32, device=text.device)
    # alive [R, C]: whether the last n tokens also stand up to here; matched: how large n can get
    alive = places < lengths[:, None] - 1
    matched = torch.zeros_like(text)
    for n in range(1, min(most, size) + 1):
        last = text.gather(1, (lengths - n).clamp(min=0)[:, None])
        equal = text[:, : size - n + 1] == last
        alive[:, n - 1 :] &= equal
        alive[:, : n - 1] = False
        matched += alive
    best = torch.where(matched >= least, matched * size + places, -1).amax(1).long()  # longest first, then latest
    start = best % size + 1
    ahead = start[:, None] + torch.arange(count, device=text.device) % (lengths - start).clamp(min=1)[:, None]
    return torch.where(best[:, None] >= 0, text.gather(1, ahead.clamp(max=size - 1)).long(), -1)
