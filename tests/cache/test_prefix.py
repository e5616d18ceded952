import random

import pytest

from leyden.cache.prefix import Chain, PrefixCache


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


@pytest.mark.parametrize("seed", range(4))
def test_random_operations_keep_every_invariant(seed):
    made = random.Random(seed)
    page = made.choice([1, 3, 4])
    cache = PrefixCache(made.randrange(2, 9), made.randrange(10, 40), page)
    running: list[tuple[int, Chain, list[int], int]] = []  # slot, chain, tokens, computed
    pool = [[made.randrange(3) for _ in range(40)] for _ in range(3)]
    for _ in range(2500):
        match made.randrange(6):
            case 0 | 1 if len(running) < cache.slots - 1:
                tokens = made.choice(pool)[: made.randrange(1, 30)] + [made.randrange(3) for _ in range(3)]
                salt = made.choice(["", "", "x"])
                hit = cache.match(tokens, salt)
                assert hit.length < len(tokens) and hit.length // page == len(hit.nodes)
                assert [t for node in hit.nodes for t in node.tokens] == tokens[: len(hit.nodes) * page]
                chain = cache.start(hit, salt)
                slot = cache.take_slot() if chain is not None else 0
                if chain is not None and slot:
                    running.append((slot, chain, tokens, hit.length))
                elif chain is not None:
                    cache.leave(chain)
            case 2 | 3 if running:
                slot, chain, tokens, computed = running.pop(made.randrange(len(running)))
                computed = made.randrange(computed, len(tokens)) if computed < len(tokens) else computed
                while len(chain.pages) * page < computed and cache.grow(chain):
                    pass
                computed = min(computed, len(chain.pages) * page)
                cache.publish(chain, tokens, computed)
                running.append((slot, chain, tokens, computed))
                copy = cache.take_slot() if made.random() < 0.3 else 0
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
    assert cache.evicted_pages and cache.evicted_snapshots
