"""The prefix index: which KV pages and which recurrent states hold which tokens. Host only, no torch.

Two kinds of things are kept, because attention and Mamba forget differently:

    page      KV of `page` consecutive tokens; valid for every sequence that begins with the same tokens
    snapshot  the recurrent state after exactly `length` tokens, in a state slot of its own; exact to the token

Pages form a tree (a node is one full page, its path from the root spells the tokens), snapshots hang on the node of
their last full page, with the tokens of the page that is only partly theirs (`tail`):

    root(salt) ── page 0..15 ── page 16..31 ── page 32..47          tail = tokens 48..50
                                    │                └ snapshot of 51 tokens, holds page 48..63 too
                                    └ snapshot of 32 tokens, tail = ()

A hit is the deepest snapshot on the path of a prompt. Its full pages are shared as they are; its partial page is
copied, because the sequence that owns it may go on writing behind the tail, and so will the one that hits.

Every slot is free, running, or a snapshot's; every page is free, or held by running sequences, the tree and snapshots
together. check() asserts both sums.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

# Uses to come of a snapshot that was used never, once, twice, ...: see PrefixCache._value.
_USES = (1.0, 0.2)


@dataclass(slots=True, eq=False)
class Node:
    """One full page in the tree; roots have no page and no tokens."""

    parent: "Node | None"
    tokens: tuple[int, ...]
    page: int
    children: "dict[tuple[int, ...], Node]" = field(default_factory=dict)
    snapshots: "dict[tuple[int, ...], Snapshot]" = field(default_factory=dict)
    used: int = 0  # tick of the last use
    gone: bool = False


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state that waits to be used again."""

    node: Node
    tail: tuple[int, ...]
    slot: int
    page: int  # the page that holds the tail; 0 if there is none
    length: int
    base: "Snapshot | None"  # the next shorter snapshot on the path when this one was made
    used: int = 0  # tick of the last use
    hits: int = 0
    gone: bool = False


@dataclass(slots=True, eq=False)
class Chain:
    """The pages of one running sequence: shared ones first (nodes[i].page == pages[i]), its own after."""

    root: Node
    nodes: list[Node] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)
    base: Snapshot | None = None  # the deepest snapshot known to lie on its path

    @property
    def last(self) -> Node:
        return self.nodes[-1] if self.nodes else self.root


@dataclass(slots=True)
class Hit:
    """What the index knows of a prompt."""

    length: int = 0  # tokens that need not be computed
    snapshot: Snapshot | None = None
    nodes: list[Node] = field(default_factory=list)  # full pages below `length`
    branch: int = 0  # tokens whose pages are known; past `length` there is a known path, but no state where it forks


class PrefixCache:
    """Owner of slots 1..slots and pages 1..pages; what nobody runs with is kept until somebody needs the room.

    What it hands out is a plan for the device, carried out later and in order: all copies of a step read before any of
    them writes. So a slot or a page may be given away while a copy from it is planned.

    keep=False hands everything back at once: no reuse, the same bookkeeping.
    """

    def __init__(self, slots: int, pages: int, page: int, keep: bool = True):
        self.page = page
        self.keep = keep
        self.slots, self.pages = slots, pages
        self._free_slots = list(range(slots, 0, -1))
        self._free_pages = list(range(pages, 0, -1))
        self._running = [0] * (pages + 1)  # sequences that read or write a page
        self._kept = [0] * (pages + 1)  # nodes and snapshots that hold a page
        self._roots: dict[str, Node] = {}
        self._snapshots: set[Snapshot] = set()
        self._idle: list[tuple[int, int, Node]] = []  # heap of nodes that may be evictable, oldest use first
        self._order = count()
        self._tick = 0  # one per lookup
        self.cached_pages = 0  # kept, but not running
        self.evicted_pages = self.evicted_snapshots = 0

    # looking up

    def match(self, tokens: Sequence[int], salt: str = "") -> Hit:
        """The longest known prefix of `tokens` that leaves at least one token to compute."""
        self._tick += 1
        hit = Hit()
        node = self._roots.get(salt)
        nodes: list[Node] = []
        position = 0
        while node is not None:
            for tail, snapshot in node.snapshots.items():
                end = position + len(tail)
                if hit.length < end < len(tokens) and tuple(tokens[position:end]) == tail:
                    hit.length, hit.snapshot, hit.nodes = end, snapshot, nodes[:]
            node = node.children.get(tuple(tokens[position : position + self.page]))
            if node is not None:
                nodes.append(node)
                position += self.page
        hit.branch = min(position, (len(tokens) - 1) // self.page * self.page)
        return hit

    # running sequences

    def start(self, hit: Hit, salt: str = "") -> Chain | None:
        """Begin a sequence on a hit. A partial page of its snapshot comes as a page of its own, still to be copied.

        None, and nothing is changed, if that page cannot be had.
        """
        chain = Chain(self._roots.setdefault(salt, Node(None, (), 0)))
        for node in hit.nodes:
            self._join(chain, node)
        if hit.snapshot is not None:
            if hit.snapshot.tail and not self.grow(chain):
                self.leave(chain)
                return None
            hit.snapshot.used = self._tick
            hit.snapshot.hits += 1
            chain.base = hit.snapshot
        return chain

    def grow(self, chain: Chain) -> bool:
        """Give the sequence another page; False if all are in use by running sequences."""
        if not self._free_pages and not self._evict_page():
            return False
        page = self._free_pages.pop()
        self._hold(page, running=1)
        chain.pages.append(page)
        return True

    def publish(self, chain: Chain, tokens: Sequence[int], computed: int) -> list[int]:
        """Share the pages that are full now; `tokens` are known up to `computed` at least.

        Where another sequence was first with the same tokens, its page takes the place of this one's: the indices in
        chain.pages of those.
        """
        moved: list[int] = []
        if not self.keep:
            return moved
        for index in range(len(chain.nodes), computed // self.page):
            key = tuple(tokens[index * self.page : (index + 1) * self.page])
            parent, own = chain.last, chain.pages[index]
            node = parent.children.get(key)
            if node is None:
                node = parent.children[key] = Node(parent, key, own)
                self._hold(own, kept=1)
            else:
                moved.append(index)
            del chain.pages[index]
            self._join(chain, node)
            self._hold(own, running=-1)
        return moved

    def leave(self, chain: Chain) -> None:
        """The sequence gives back its pages; those in the tree stay there."""
        for page in chain.pages:
            self._hold(page, running=-1)
        for node in chain.nodes:
            self._rest(node)
        chain.pages, chain.nodes = [], []

    def park(self, chain: Chain, tokens: Sequence[int], length: int, slot: int) -> None:
        """The sequence stops, for now or for good: its slot, whose state is that of `length` tokens, is a snapshot."""
        self.publish(chain, tokens, length)
        if not self.add(chain, tokens, length, slot):
            self.free_slot(slot)
        self.leave(chain)

    # snapshots

    def take_slot(self) -> int:
        """A slot, for a running sequence or for a snapshot; 0 if all are running."""
        if not self._free_slots:
            if not self._snapshots:
                return 0
            self._drop(self._least())
        return self._free_slots.pop()

    def free_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def add(self, chain: Chain, tokens: Sequence[int], length: int, slot: int) -> bool:
        """Keep `slot`, which holds the state after `length` published tokens of the chain; False: not needed."""
        if not self.keep or not length:
            return False
        full = length // self.page
        node = chain.nodes[full - 1] if full else chain.root
        tail = tuple(tokens[full * self.page : length])
        known = node.snapshots.get(tail)
        if known is not None:
            known.used = self._tick
            chain.base = known
            return False
        page = chain.pages[full] if tail else 0
        if page:
            self._hold(page, kept=1)
        snapshot = Snapshot(node, tail, slot, page, length, chain.base, used=self._tick)
        node.snapshots[tail] = snapshot
        self._snapshots.add(snapshot)
        chain.base = snapshot
        return True

    # making room

    @property
    def available_pages(self) -> int:
        """Pages that grow() could give, one after the other."""
        return len(self._free_pages) + self.cached_pages

    def room(self, hit: Hit, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens that starts from this hit would find its pages."""
        shared = sum(1 for node in hit.nodes if self._running[node.page])
        return self.available_pages >= -(-tokens // self.page) - shared

    def _least(self) -> Snapshot:
        return min(self._snapshots, key=self._value)

    def _value(self, snapshot: Snapshot) -> float:
        """Tokens that it saves over the next shorter snapshot, times the uses to come, over the time since the last.

        One that was used once has most likely been left behind by its conversation, one that was used more often lies
        where conversations part. All snapshots have the same size, so bytes make no difference between them.
        """
        while snapshot.base is not None and snapshot.base.gone:
            snapshot.base = snapshot.base.base
        saved = snapshot.length - (snapshot.base.length if snapshot.base is not None else 0)
        uses = _USES[snapshot.hits] if snapshot.hits < len(_USES) else snapshot.hits
        return saved * uses / (1 + self._tick - snapshot.used)

    def _evict_page(self) -> bool:
        """Free a page: the leaf that rested longest, else what the snapshot of the least value holds."""
        while not self._free_pages:
            if self._idle:
                _, _, node = heapq.heappop(self._idle)
                if self._evictable(node):
                    self._remove(node)
            elif self._snapshots:
                self._drop(self._least())
            else:
                return False
        return True

    def _evictable(self, node: Node) -> bool:
        return not (node.gone or node.parent is None or node.children or node.snapshots or self._running[node.page])

    def _offer(self, node: Node) -> None:
        """Remember a node for eviction if nothing hangs on it; it is looked at again when its turn comes."""
        if self._evictable(node):
            heapq.heappush(self._idle, (node.used, next(self._order), node))

    def _drop(self, snapshot: Snapshot) -> None:
        snapshot.gone = True
        self._snapshots.remove(snapshot)
        del snapshot.node.snapshots[snapshot.tail]
        if snapshot.page:
            self._hold(snapshot.page, kept=-1)
        self.free_slot(snapshot.slot)
        self.evicted_snapshots += 1
        self._offer(snapshot.node)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        node.gone = True
        del node.parent.children[node.tokens]
        self._hold(node.page, kept=-1)
        self.evicted_pages += 1
        self._offer(node.parent)

    # who holds what

    def _join(self, chain: Chain, node: Node) -> None:
        """The next page of the chain is the node's."""
        self._hold(node.page, running=1)
        node.used = self._tick
        chain.pages.insert(len(chain.nodes), node.page)
        chain.nodes.append(node)

    def _rest(self, node: Node) -> None:
        node.used = self._tick
        self._offer(node)

    def _hold(self, page: int, running: int = 0, kept: int = 0) -> None:
        cached = self._kept[page] > 0 and not self._running[page]
        self._running[page] += running
        self._kept[page] += kept
        self.cached_pages += (self._kept[page] > 0 and not self._running[page]) - cached
        if not self._running[page] and not self._kept[page]:
            self._free_pages.append(page)

    # looking in

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def clear(self) -> None:
        """Forget everything that no running sequence holds."""
        for snapshot in list(self._snapshots):
            self._drop(snapshot)
        while self._idle:
            _, _, node = heapq.heappop(self._idle)
            if self._evictable(node):
                self._remove(node)

    def check(self, running: Sequence[tuple[int, Chain]]) -> None:
        """Assert the sums, given the (slot, chain) of every running sequence."""
        slots = [*self._free_slots, *(s.slot for s in self._snapshots), *(slot for slot, _ in running)]
        assert sorted(slots) == list(range(1, self.slots + 1)), f"slots lost or doubled: {sorted(slots)}"
        nodes: list[Node] = []
        for root in self._roots.values():
            nodes += root.children.values()
        for node in nodes:  # grows while we walk
            nodes += node.children.values()
            assert not node.gone
        kept, used = [0] * (self.pages + 1), [0] * (self.pages + 1)
        for node in nodes:
            kept[node.page] += 1
        for snapshot in self._snapshots:
            assert snapshot.node.snapshots[snapshot.tail] is snapshot and not snapshot.node.gone
            kept[snapshot.page] += 1
        for _, chain in running:
            assert [node.page for node in chain.nodes] == chain.pages[: len(chain.nodes)]
            for page in chain.pages:
                used[page] += 1
        kept[0] = 0
        assert kept == self._kept, "a page is kept by the wrong number of nodes and snapshots"
        assert used == self._running, "a page is used by the wrong number of running sequences"
        free = [page for page in range(1, self.pages + 1) if not kept[page] and not used[page]]
        assert sorted(self._free_pages) == free, "free pages are not those that nobody holds"
        cached = sum(1 for page in range(1, self.pages + 1) if kept[page] and not used[page])
        assert cached == self.cached_pages, f"{cached} pages are cached, counted were {self.cached_pages}"
