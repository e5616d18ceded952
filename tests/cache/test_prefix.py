import random

import pytest

from leyden.cache.prefix import Chain, PrefixCache
from leyden.cache.tier import Tier
from leyden.types import Moves


def run(cache: PrefixCache, tokens: list[int], slot: int | None = None, salt: str = "") -> tuple[Chain, int]:
    """A sequence that starts from what is cached and has computed all of `tokens`."""
    chain = cache.start(cache.match(tokens, salt), salt)
    assert chain is not None
    while len(chain.pages) * cache.page < len(tokens):
        assert cache.grow(chain)
    return chain, cache.take_slot() if slot is None else slot


def park(cache: PrefixCache, tokens: list[int], salt: str = "") -> None:
    chain, slot = run(cache, tokens, salt=salt)
    cache.park(chain, tokens, len(tokens), slot)
    cache.check([])


def test_a_hit_is_exact_to_the_token_and_leaves_one_to_compute():
    cache = PrefixCache(4, 20, 4)
    tokens = list(range(10))
    park(cache, tokens)
    assert cache.match(tokens).length == 0  # all of it would leave nothing to compute
    assert cache.match([*tokens, 99]).length == 10
    assert cache.match([*tokens[:9], 99, 98]).length == 0  # pages match, but there is no state at 8
    assert cache.match([*tokens[:9], 99, 98]).branch == 8


def test_salts_separate_tenants():
    cache = PrefixCache(4, 20, 4)
    park(cache, list(range(9)), salt="a")
    assert cache.match([*range(9), 1], "a").length == 9
    assert cache.match([*range(9), 1], "b").length == cache.match([*range(9), 1]).length == 0


def test_the_deepest_snapshot_wins_and_its_partial_page_is_a_page_of_its_own():
    cache = PrefixCache(4, 20, 4)
    park(cache, list(range(6)))
    park(cache, list(range(10)))
    hit = cache.match(list(range(12)))
    assert hit.length == 10 and len(hit.nodes) == 2
    chain = cache.start(hit)
    assert chain.pages[:2] == [node.page for node in hit.nodes]
    assert chain.pages[2] != hit.snapshot.page
    cache.leave(chain)
    cache.check([])


def test_equal_prefixes_share_their_pages():
    cache = PrefixCache(4, 20, 4)
    first, a = run(cache, list(range(12)))
    second, b = run(cache, list(range(12)))
    assert not set(first.pages) & set(second.pages)
    assert cache.publish(first, list(range(12)), 12) == []
    assert cache.publish(second, list(range(12)), 12) == [0, 1, 2]
    assert first.pages == second.pages
    assert cache.free_pages == 17
    cache.check([(a, first), (b, second)])


def test_running_pages_are_never_evicted_and_leaves_go_before_their_parents():
    cache = PrefixCache(8, 6, 4)
    park(cache, list(range(16)))
    chain, slot = run(cache, list(range(8)) + [50])  # shares no state, so it runs on pages of its own
    assert cache.available_pages == 6 - 3
    assert cache.grow(chain) and cache.evicted_snapshots == 1
    assert cache.match([*range(16), 1]).branch == 8  # the two last pages went, last first
    cache.check([(slot, chain)])
    while cache.grow(chain):
        pass
    assert len(chain.pages) == 6 and cache.cached_pages == 0
    cache.check([(slot, chain)])


def test_the_snapshot_that_saves_least_goes_first():
    cache = PrefixCache(2, 100, 4)
    park(cache, list(range(100)))
    park(cache, [7] * 5)
    park(cache, [9] * 40)
    assert cache.match([*range(100), 1]).length == 100
    assert cache.match([7] * 6).length == 0


def test_without_keeping_everything_is_given_back():
    cache = PrefixCache(2, 20, 4, keep=False)
    park(cache, list(range(30)))
    assert (cache.free_slots, cache.free_pages) == (2, 20)
    assert cache.match(list(range(31))).length == 0


def test_a_salt_that_nobody_uses_any_more_is_forgotten():
    cache = PrefixCache(2, 8, 4)
    for i in range(50):
        park(cache, [1, 2, 3, 4, 5, 6], salt=f"tenant {i}")
    assert len(cache._top.children) <= 8  # a page each, at most
    for i in range(50):
        chain = cache.start(cache.match([9, 9], f"guest {i}"), f"guest {i}")
        assert cache._top.children[f"guest {i}",].chains == 1
        cache.leave(chain)
    assert len(cache._top.children) <= 8
    cache.clear()
    assert not cache._top.children


def test_what_is_only_remembered_for_eviction_does_not_grow():
    cache = PrefixCache(2, 30, 4)
    for _ in range(300):
        chain, slot = run(cache, list(range(12)))
        cache.publish(chain, list(range(12)), 12)
        cache.leave(chain)
        cache.free_slot(slot)
    assert len(cache._idle) <= 2 * 30 + 8


def test_what_leaves_the_device_can_be_hit_in_the_tier_and_what_nothing_needs_is_dropped():
    cache = PrefixCache(2, 6, 4, tier=Tier(3, 9))
    park(cache, list(range(10)))
    park(cache, [50] * 10)
    park(cache, [60] * 10)  # no room for three: the first goes
    assert cache.far_snapshots == 1
    moves, _ = cache.moves()
    assert len(moves.states_out) == 1 and len(moves.pages_out) == 3
    hit = cache.match([*range(10), 99])
    assert hit.length == 10 and [node.page for node in hit.nodes] == [0, 0]
    chain = cache.start(hit)
    slot = cache.take_slot()
    assert cache.restore(hit, slot) == 0
    moves, _ = cache.moves()
    assert len(moves.pages_in) == 3 and moves.states_in == [(1, slot)]
    assert {page for _, page in moves.pages_in} == set(chain.pages)
    cache.check([(slot, chain)])
    cache.leave(chain)
    cache.free_slot(slot)
    cache.clear()
    cache.check([])
    assert (len(cache.tier.free_slots), len(cache.tier.free_pages)) == (3, 9)


def test_what_is_asked_back_before_it_left_is_copied_on_the_device():
    cache = PrefixCache(2, 6, 4, tier=Tier(3, 9))
    park(cache, list(range(10)))
    chain, slot = run(cache, [50] * 9)
    other, second = run(cache, [60] * 9)
    assert cache.far_snapshots == 1
    cache.leave(other)
    cache.free_slot(second)
    hit = cache.match([*range(10), 99])
    again = cache.start(hit)
    slot = cache.take_slot()
    assert cache.restore(hit, slot) == hit.slot > 0  # before the step, the state is still there
    moves, copies = cache.moves()
    assert not moves.pages_in and not moves.states_in
    assert {page for _, page in copies} <= set(again.pages)


def test_the_tier_drops_what_is_worth_least():
    cache = PrefixCache(1, 40, 4, tier=Tier(2, 40))
    for token, n in ((1, 8), (2, 40), (3, 30), (4, 20)):
        park(cache, [token] * n)
    lengths = {token: cache.match([token] * 50).length for token in (1, 2, 3, 4)}
    assert lengths == {1: 0, 2: 40, 3: 30, 4: 20}


class Bytes:
    """What pages and slots hold, on the device and in the tier: token by token, as the moves of the index say."""

    def __init__(self):
        self.pages, self.slots, self.far_pages, self.far_slots = {}, {}, {}, {}

    def carry(self, cache: PrefixCache, more=()):
        moves, copies = cache.moves()
        moves = moves or Moves()
        taken = [(self.pages, page, self.pages.get(source)) for source, page in [*copies, *more]]
        taken += [(self.far_pages, far, self.pages.get(page)) for page, far in moves.pages_out]
        taken += [(self.pages, page, self.far_pages.get(far)) for far, page in moves.pages_in]
        taken += [(self.far_slots, far, self.slots.get(slot)) for slot, far in moves.states_out]
        taken += [(self.slots, slot, self.far_slots.get(far)) for far, slot in moves.states_in]
        for place, number, content in taken:
            place[number] = content


@pytest.mark.parametrize("tier", [None, (1, 6), (4, 20)])
@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_invariant(seed, tier):
    made = random.Random(seed)
    page = made.choice([1, 3, 4])
    slots, pages = made.randrange(2, 9), made.randrange(10, 40)
    cache = PrefixCache(slots, pages, page, tier=Tier(*tier) if tier else None)
    held = Bytes()
    running: list[tuple[int, Chain, list[int], int]] = []  # slot, chain, tokens, computed
    pool = [[made.randrange(3) for _ in range(40)] for _ in range(3)]
    hits = far_hits = 0

    def write(slot: int, chain: Chain, tokens: list[int], computed: int) -> None:
        held.slots[slot] = tuple(tokens[:computed])
        for index in range(len(chain.nodes), len(chain.pages)):
            if tokens[index * page : computed]:
                held.pages[chain.pages[index]] = tuple(tokens[index * page : min(computed, (index + 1) * page)])

    for _ in range(2500):
        match made.randrange(6):
            case 0 | 1 if len(running) < cache.slots - 1:
                tokens = made.choice(pool)[: made.randrange(1, 30)] + [made.randrange(3) for _ in range(3)]
                salt = made.choice(["", "", "x", *(f"once {_}",) * (made.random() < 0.2)])
                hit = cache.match(tokens, salt)
                assert hit.length < len(tokens) and hit.length // page == len(hit.nodes)
                assert [t for node in hit.nodes for t in node.tokens] == tokens[: len(hit.nodes) * page]
                chain = cache.start(hit, salt)
                slot = cache.take_slot() if chain is not None else 0
                if chain is not None and slot:
                    source = cache.restore(hit, slot)
                    state = held.slots.get(source, ())
                    held.carry(cache, [(hit.page, chain.pages[-1])] if hit.page else [])
                    held.slots[slot] = held.slots[slot] if hit.far_slot else state if source else ()
                    assert held.slots[slot] == tuple(tokens[: hit.length]), "the state is another one"
                    found = [t for number in chain.pages for t in held.pages[number]]
                    assert found[: hit.length] == tokens[: hit.length], "the pages hold other tokens"
                    running.append((slot, chain, tokens, hit.length))
                    hits += hit.length > 0
                    far_hits += hit.far_slot > 0
                elif chain is not None:
                    cache.withdraw(chain, slot)
                    cache.leave(chain)
            case 2 | 3 if running:
                slot, chain, tokens, computed = running.pop(made.randrange(len(running)))
                computed = made.randrange(computed, len(tokens)) if computed < len(tokens) else computed
                while len(chain.pages) * page < computed and cache.grow(chain):
                    pass
                computed = min(computed, len(chain.pages) * page)
                held.carry(cache)
                write(slot, chain, tokens, computed)
                cache.publish(chain, tokens, computed)
                running.append((slot, chain, tokens, computed))
                copy = cache.take_slot() if made.random() < 0.3 else 0
                if copy:
                    held.carry(cache)
                    held.slots[copy] = held.slots[slot]
                if copy and not cache.add(chain, tokens, computed, copy):
                    cache.free_slot(copy)
            case 4 if running:
                slot, chain, tokens, computed = running.pop(made.randrange(len(running)))
                cache.park(chain, tokens, computed, slot)
            case 5 if running and made.random() < 0.3:
                slot, chain, *_ = running.pop(made.randrange(len(running)))
                cache.leave(chain)
                cache.free_slot(slot)
        cache.check([(slot, chain) for slot, chain, *_ in running])
    for slot, chain, tokens, computed in running:
        cache.park(chain, tokens, computed, slot)
    cache.clear()
    cache.check([])
    assert (cache.free_slots, cache.free_pages) == (cache.slots, cache.pages)
    assert not tier or (len(cache.tier.free_slots), len(cache.tier.free_pages)) == tier
    assert cache.evicted_pages and cache.evicted_snapshots and hits and not cache._top.children
    assert bool(far_hits) == bool(tier)
