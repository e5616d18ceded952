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

With a tier of host memory, what has to leave the device goes there if it is worth it: nodes and snapshots stay in the
tree and change their place. What is on the device forms the upper part of the tree: a page in host memory has nothing
on the device below it, and something that can be hit.

Every slot is free, running, or a snapshot's; every page is free, or held by running sequences, the tree and snapshots
together. check() asserts both sums, and those of the tier.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count, islice
from math import inf
from typing import Any

from leyden.cache.tier import Tier
from leyden.types import Moves

_Placed = tuple[int, int, int]  # number in the saved order, place on the device, place in the tier

# Uses to come of a snapshot that was used never, once, twice, ...: see PrefixCache._value.
_USES = (1.0, 0.2)
_LOOKED_AT = 256  # candidates for eviction


@dataclass(slots=True, eq=False)
class Node:
    """One full page in the tree. Roots, one for each salt, hang on a node above them and have no page."""

    parent: "Node | None"
    tokens: tuple[int | str, ...]  # of a root: the salt
    page: int  # 0: not on the device
    far: int = 0  # its place in the tier
    children: "dict[tuple[int | str, ...], Node]" = field(default_factory=dict)
    snapshots: "dict[tuple[int, ...], Snapshot]" = field(default_factory=dict)
    near: int = 0  # children and snapshots that are on the device
    chains: int = 0  # of a root: sequences that run below it
    used: int = 0  # tick of the last use
    gone: bool = False

    @property
    def holds(self) -> bool:
        return bool(self.children or self.snapshots)


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state that waits to be used again."""

    node: Node
    tail: tuple[int, ...]
    slot: int  # 0: not on the device
    page: int  # the page that holds the tail; 0 if there is none
    length: int
    base: "Snapshot | None"  # the next shorter snapshot on the path when this one was made
    far_slot: int = 0  # its places in the tier
    far_page: int = 0
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
    # Once a sequence has started on it: what to copy to its slot and to its last page, as both stand before this step.
    slot: int = 0
    page: int = 0
    far_slot: int = 0


class PrefixCache:
    """Owner of slots 1..slots and pages 1..pages; what nobody runs with is kept until somebody needs the room.

    What it hands out is a plan for the device, carried out later and in order: all copies of a step read before any of
    them writes. So a slot or a page may be given away while a copy from it is planned.

    keep=False hands everything back at once: no reuse, the same bookkeeping.
    """

    def __init__(self, slots: int, pages: int, page: int, keep: bool = True, tier: Tier | None = None):
        self.page = page
        self.keep = keep
        self.slots, self.pages = slots, pages
        self._free_slots = list(range(slots, 0, -1))
        self._free_pages = list(range(pages, 0, -1))
        self._running = [0] * (pages + 1)  # sequences that read or write a page
        self._kept = [0] * (pages + 1)  # nodes and snapshots that hold a page
        self.tier = tier
        self._top = Node(None, (), 0)
        # On the device and in the tier, whoever was not used for longest first.
        self._snapshots: dict[Snapshot, None] = {}
        self._far: dict[Snapshot, None] = {}
        self._wanted: Snapshot | None = None  # in the tier, and about to be used
        self._arriving: dict[int, Node] = {}  # page -> node whose content the next step brings back
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
        node = self._top.children.get((salt,))
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

        None, and nothing is handed out, if the pages for that cannot be had.
        """
        root = self._root(salt)
        root.chains += 1
        chain = Chain(root)
        snapshot = hit.snapshot
        if snapshot is None:
            return chain
        hit.slot, hit.page, far_page = snapshot.slot, snapshot.page, snapshot.far_page
        if snapshot.far_slot:
            assert self.tier is not None
            hit.slot = self.tier.here(snapshot.far_slot)
            hit.far_slot = 0 if hit.slot else snapshot.far_slot
            self._wanted = snapshot
        whole = True
        for node in hit.nodes:
            whole = whole and (node.page > 0 or self._bring(node))
            if whole:
                self._join(chain, node)
        if whole and snapshot.tail and (whole := self.grow(chain)) and far_page:
            assert self.tier is not None
            self.tier.page_in(far_page, chain.pages[-1])
        self._wanted = None
        if not whole:
            self.leave(chain)
            return None
        self._touch(snapshot)
        snapshot.hits += 1
        chain.base = snapshot
        return chain

    def grow(self, chain: Chain) -> bool:
        """Give the sequence another page; False if all are in use by running sequences."""
        page = self._take_page()
        if page:
            self._hold(page, running=1)
            chain.pages.append(page)
        return page > 0

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
                node = parent.children[key] = Node(parent, key, 0)
                self._settle(node, own)
            elif node.page:
                moved.append(index)
            else:  # known in host memory only, and here is its content
                self._unplace(node)
                self._settle(node, own)
            del chain.pages[index]
            self._join(chain, node)
            self._hold(own, running=-1)
        return moved

    def leave(self, chain: Chain) -> None:
        """The sequence gives back its pages; those in the tree stay there."""
        for page in chain.pages:
            self._hold(page, running=-1)
        for node in chain.nodes:
            node.used = self._tick
            self._offer(node)
        chain.root.chains -= 1
        chain.pages, chain.nodes = [], []
        self._offer(chain.root)

    def restore(self, hit: Hit, slot: int) -> int:
        """The slot to copy the state of a hit from; 0: there is none, or it is brought from the tier."""
        if hit.far_slot:
            assert self.tier is not None
            self.tier.state_in(hit.far_slot, slot)
        return hit.slot

    def withdraw(self, chain: Chain, slot: int) -> None:
        """A sequence that started in this very step does not run: nothing is to be brought to what is its own."""
        if self.tier is not None:
            self.tier.withdraw(slot, chain.pages[len(chain.nodes) :])

    def moves(self) -> tuple[Moves | None, list[tuple[int, int]]]:
        """For the step that is launched now: what moves to and from the tier, and copies of pages on the device."""
        if self.tier is None:
            return None, []
        moved = self.tier.take()
        arrived, self._arriving = self._arriving, {}
        for node in arrived.values():
            self._offer(node)
        return moved

    def park(self, chain: Chain, tokens: Sequence[int], length: int, slot: int) -> None:
        """The sequence stops, for now or for good: its slot, whose state is that of `length` tokens, is a snapshot."""
        self.publish(chain, tokens, length)
        if not self.add(chain, tokens, length, slot):
            self.free_slot(slot)
        self.leave(chain)

    # snapshots

    def take_slot(self) -> int:
        """A slot, for a running sequence or for a snapshot; 0 if all are running."""
        if not self._free_slots and (least := self._least(self._snapshots)) is not None:
            self._retire(least)
        return self._free_slots.pop() if self._free_slots else 0

    def free_slot(self, slot: int) -> None:
        self._free_slots.append(slot)

    def add(self, chain: Chain, tokens: Sequence[int], length: int, slot: int) -> bool:
        """Keep `slot`, which holds the state after `length` published tokens of the chain; False: not needed."""
        if not self.keep or not length:
            return False
        full = length // self.page
        node = chain.nodes[full - 1] if full else chain.root
        tail = tuple(tokens[full * self.page : length])
        snapshot = node.snapshots.get(tail)
        if snapshot is None:
            snapshot = node.snapshots[tail] = Snapshot(node, tail, 0, 0, length, chain.base)
        self._touch(snapshot)
        chain.base = snapshot
        if snapshot.slot:
            return False
        self._unplace(snapshot)
        self._settle(snapshot, chain.pages[full] if tail else 0, slot)
        return True

    # making room

    @property
    def available_pages(self) -> int:
        """Pages that grow() could give, one after the other."""
        arriving = sum(not self._running[page] for page in self._arriving)
        return len(self._free_pages) + self.cached_pages - arriving

    def room(self, hit: Hit, tokens: int) -> bool:
        """Whether a sequence of `tokens` tokens that starts from this hit would find its pages."""
        shared = sum(1 for node in hit.nodes if node.page and self._running[node.page])
        return self.available_pages >= -(-tokens // self.page) - shared

    def _touch(self, snapshot: Snapshot) -> None:
        snapshot.used = self._tick
        for place in (self._snapshots, self._far):
            if snapshot in place:
                del place[snapshot]
                place[snapshot] = None

    def _least(self, snapshots: dict[Snapshot, None]) -> Snapshot | None:
        """The one of the least value, of those that were not used for longest: thousands would take too long."""
        oldest = (snapshot for snapshot in islice(snapshots, _LOOKED_AT) if snapshot is not self._wanted)
        return min(oldest, key=self._value, default=None)

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

    def _take_page(self) -> int:
        """A page: a free one, else of the leaf that rested longest, else what the least snapshot holds; 0: none."""
        while not self._free_pages:
            if self._idle:
                _, _, node = heapq.heappop(self._idle)
                if self._evictable(node):
                    self._evict(node)
            elif (least := self._least(self._snapshots)) is not None:
                self._retire(least)
            else:
                return 0
        return self._free_pages.pop()

    def _evictable(self, node: Node) -> bool:
        resting = node.page > 0 and not self._running[node.page] and node.page not in self._arriving
        return resting and not node.near and not node.gone

    def _offer(self, node: Node) -> None:
        """Something let go of a node: see whether it is needed, or can be evicted when its turn comes."""
        while not (node.page or node.holds or node.chains or node.gone or node is self._top):
            above = node.parent
            assert above is not None
            self._remove(node)  # in host memory, or a root
            node = above
        if self._evictable(node):
            heapq.heappush(self._idle, (node.used, next(self._order), node))
        if len(self._idle) > 2 * self.pages + 8:  # most of it is out of date: nobody needed room for long
            resting = {entry[2] for entry in self._idle if self._evictable(entry[2])}
            self._idle = [(node.used, next(self._order), node) for node in resting]
            heapq.heapify(self._idle)

    def _evict(self, node: Node) -> None:
        """Take a node from the device: to the tier if something below needs it, else for good."""
        self.evicted_pages += 1
        while node.holds:
            assert self.tier is not None
            if self.tier.free_pages:
                far = self.tier.page_out(node.page)
                self._unplace(node)
                node.far = far
                assert node.parent is not None
                self._offer(node.parent)
                return
            if not self._make_far_room(inf):
                self._forget(node)
        self._remove(node)
        assert node.parent is not None
        self._offer(node.parent)

    def _retire(self, snapshot: Snapshot) -> None:
        """Take a snapshot from the device: to the tier if it is worth a place there, else for good."""
        self.evicted_snapshots += 1
        tier, value = self.tier, self._value(snapshot)
        while tier is not None and not (tier.free_slots and (tier.free_pages or not snapshot.page)):
            if not self._make_far_room(value):
                tier = None
        if tier is None:
            self._drop(snapshot)
            return
        far_slot, far_page = tier.state_out(snapshot.slot), tier.page_out(snapshot.page) if snapshot.page else 0
        self._unplace(snapshot)
        snapshot.far_slot, snapshot.far_page = far_slot, far_page
        self._far[snapshot] = None
        self._offer(snapshot.node)

    def _make_far_room(self, value: float) -> bool:
        """Drop the snapshot of the least value from the tier, if that is below `value`."""
        least = self._least(self._far)
        if least is None or self._value(least) >= value:
            return False
        self._drop(least)
        return True

    def _drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot, wherever it is."""
        snapshot.gone = True
        del snapshot.node.snapshots[snapshot.tail]
        self._unplace(snapshot)
        self._offer(snapshot.node)

    def _forget(self, node: Node) -> None:
        """Drop everything below a node; nothing of that is on the device."""
        below = [node]
        for entry in below:  # grows while we walk
            below += entry.children.values()
        for entry in reversed(below):
            for snapshot in list(entry.snapshots.values()):
                self._drop(snapshot)

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        node.gone = True
        del node.parent.children[node.tokens]
        self._unplace(node)

    # who holds what

    def _settle(self, what: Node | Snapshot, page: int, slot: int = 0) -> None:
        """A node or a snapshot is on the device now."""
        what.page = page
        if page:
            self._hold(page, kept=1)
        if isinstance(what, Snapshot):
            what.slot = slot
            self._snapshots[what] = None
            what.node.near += 1
        else:
            assert what.parent is not None
            what.parent.near += 1

    def _unplace(self, what: Node | Snapshot) -> None:
        """It gives up its places, on the device or in the tier."""
        if what.page:
            self._hold(what.page, kept=-1)
        if isinstance(what, Snapshot):
            if what.slot:
                self.free_slot(what.slot)
                del self._snapshots[what]
                what.node.near -= 1
            elif what.far_slot:
                assert self.tier is not None
                self.tier.free_slot(what.far_slot)
                if what.far_page:
                    self.tier.free_page(what.far_page)
                del self._far[what]
            what.slot = what.page = what.far_slot = what.far_page = 0
        else:
            if what.page:
                assert what.parent is not None
                what.parent.near -= 1
            elif what.far:
                assert self.tier is not None
                self.tier.free_page(what.far)
            what.page = what.far = 0

    def _bring(self, node: Node) -> bool:
        """Plan the way of a page from the tier to the device; False: there is no page for it."""
        page = self._take_page()
        if page:
            assert self.tier is not None
            self.tier.page_in(node.far, page)
            self._unplace(node)
            self._settle(node, page)
            self._arriving[page] = node
        return page > 0

    def _root(self, salt: str) -> Node:
        root = self._top.children.get((salt,))
        if root is None:
            root = self._top.children[(salt,)] = Node(self._top, (salt,), 0)
        return root

    def _join(self, chain: Chain, node: Node) -> None:
        """The next page of the chain is the node's."""
        self._hold(node.page, running=1)
        node.used = self._tick
        chain.pages.insert(len(chain.nodes), node.page)
        chain.nodes.append(node)

    def _hold(self, page: int, running: int = 0, kept: int = 0) -> None:
        cached = self._kept[page] > 0 and not self._running[page]
        self._running[page] += running
        self._kept[page] += kept
        self.cached_pages += (self._kept[page] > 0 and not self._running[page]) - cached
        if not self._running[page] and not self._kept[page]:
            self._free_pages.append(page)

    # to a file and back

    def contents(self) -> tuple[list[Node], list[Snapshot]]:
        """All snapshots, the most valuable first, and the nodes that they need, parents first, roots included."""
        snapshots = sorted(self._snapshots | self._far, key=self._value, reverse=True)
        needed: set[Node] = {self._top}
        for snapshot in snapshots:
            node: Node | None = snapshot.node
            while node is not None and node not in needed:
                needed.add(node)
                node = node.parent
        nodes = [root for root in self._top.children.values() if root in needed]
        for node in nodes:  # grows while we walk
            nodes += [child for child in node.children.values() if child in needed]
        return nodes, snapshots

    def insert(self, nodes: list[Any], snapshots: list[Any]) -> tuple[list[_Placed], list[_Placed]]:
        """Take in contents as they were saved, the most valuable first, until there is no more room for one.

        nodes are [number of the parent or -1, tokens], snapshots [number of the node, tail, length, hits]. -> where
        pages and states belong, as (number in the saved order, place on the device, place in the tier). Pages are
        numbered as they were saved: those of the nodes but for roots, then the tails.
        """
        numbers = [number for number, (parent, _) in enumerate(nodes) if parent >= 0]
        page_of = {number: at for at, number in enumerate(numbers)}
        made: dict[int, Node] = {}
        pages: list[_Placed] = []
        states: list[_Placed] = []
        tails = len(numbers)
        for at, (number, tail, length, hits) in enumerate(snapshots):
            path = [number]
            while nodes[path[-1]][0] >= 0:
                path.append(nodes[path[-1]][0])
            path.reverse()
            missing = [step for step in path[1:] if step not in made]
            tail_page, tails = (tails, tails + 1) if tail else (0, tails)
            above = made.get(path[-1 - len(missing)])
            near = above is None or above.page > 0
            if near and self._free_slots and len(self._free_pages) >= len(missing) + bool(tail):
                slot, far_slot, take = self._free_slots.pop(), 0, self._free_pages
            elif self.tier and self.tier.free_slots and len(self.tier.free_pages) >= len(missing) + bool(tail):
                slot, far_slot, take = 0, self.tier.free_slots.pop(), self.tier.free_pages
            else:
                continue
            node = self._root(str(nodes[path[0]][1][0]))
            base: Snapshot | None = None
            for step in path[1:]:
                base = max(node.snapshots.values(), key=lambda s: s.length, default=base)
                if step not in made:
                    key, page = tuple(nodes[step][1]), take.pop()
                    below = node.children[key] = made[step] = Node(node, key, 0)
                    if slot:
                        self._settle(below, page)
                    else:
                        below.far = page
                    pages.append((page_of[step], below.page, below.far))
                node = made[step]
            page = take.pop() if tail else 0
            snapshot = node.snapshots[tuple(tail)] = Snapshot(node, tuple(tail), 0, 0, length, base, hits=hits)
            if slot:
                self._settle(snapshot, page, slot)
            else:
                snapshot.far_slot, snapshot.far_page = far_slot, page
                self._far[snapshot] = None
            if tail:
                pages.append((tail_page, snapshot.page, snapshot.far_page))
            states.append((at, slot, far_slot))
        for node in made.values():
            self._offer(node)
        return pages, states

    # looking in

    @property
    def snapshots(self) -> int:
        return len(self._snapshots)

    @property
    def far_snapshots(self) -> int:
        return len(self._far)

    @property
    def free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def free_pages(self) -> int:
        return len(self._free_pages)

    def clear(self) -> None:
        """Forget everything that no running sequence holds."""
        for snapshot in [*self._snapshots, *self._far]:
            self._drop(snapshot)
        while self._idle:
            _, _, node = heapq.heappop(self._idle)
            if self._evictable(node):
                self._evict(node)

    def check(self, running: Sequence[tuple[int, Chain]]) -> None:
        """Assert the sums, given the (slot, chain) of every running sequence."""
        slots = [*self._free_slots, *(s.slot for s in self._snapshots), *(slot for slot, _ in running)]
        assert sorted(slots) == list(range(1, self.slots + 1)), f"slots lost or doubled: {sorted(slots)}"
        nodes = list(self._top.children.values())
        for root in nodes:
            chains = sum(chain.root is root for _, chain in running)
            assert root.chains == chains and (chains or root.holds), "a root is kept for nobody"
        kept, used = [0] * (self.pages + 1), [0] * (self.pages + 1)
        far_pages, snapshots = [], 0
        for node in nodes:  # grows while we walk
            nodes += node.children.values()
            above = node.parent
            assert above is not None and not node.gone and above.children[node.tokens] is node
            near = [child.page for child in node.children.values()] + [s.slot for s in node.snapshots.values()]
            assert node.near == len([place for place in near if place]), "what is on the device was miscounted"
            if above is not self._top:
                assert (node.page > 0) != (node.far > 0), "a page is in no place, or in two"
                assert not node.page or above.page or above.parent is self._top, "the tree has a hole on the device"
                assert node.page or node.holds, "host memory keeps what cannot be hit"
                kept[node.page] += 1
                far_pages += [node.far] * (node.far > 0)
            snapshots += len(node.snapshots)
        for snapshot in self._snapshots | self._far:
            assert snapshot.node.snapshots[snapshot.tail] is snapshot and not snapshot.node.gone
            assert (snapshot.slot > 0) == (snapshot in self._snapshots) != (snapshot.far_slot > 0)
            assert bool(snapshot.tail) == bool(snapshot.page or snapshot.far_page)
            kept[snapshot.page] += 1
            far_pages += [snapshot.far_page] * (snapshot.far_page > 0)
        assert snapshots == len(self._snapshots) + len(self._far), "a snapshot is in no place, or in two"
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
        if self.tier is not None:
            self.tier.check(far_pages, [snapshot.far_slot for snapshot in self._far])
