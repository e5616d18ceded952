"""Which anchors a batch has, and which drafts of theirs have a right answer."""

import numpy as np

from leyden.train.batches import Batch
from leyden.train.blocks import Blocks

LENS = (6, 3, 9)
LEARNED = [0, 0, 1, 1, 1, 1] + [1, 1, 0] + [0, 1, 1, 0, 0, 1, 1, 1, 1]


def batch() -> Batch:
    return Batch(np.arange(100, 118), np.asarray(LEARNED, dtype=np.float32), LENS)


def test_anchors_are_learned_tokens_before_learned_tokens():
    blocks = Blocks.all(batch())
    # 7 is the only learned token of its sequence that something precedes, and nothing learned follows it
    assert blocks.anchors.tolist() == [[2, 3, 4, 0], [0, 0, 0, 0], [1, 5, 6, 7]]
    assert blocks.tokens.tolist() == [[2, 3, 4, 0], [0, 0, 0, 0], [10, 14, 15, 16]]
    assert blocks.reach.tolist() == [[3, 2, 1, 0], [0, 0, 0, 0], [1, 3, 2, 1]]


def test_drafts_end_with_the_answer():
    drafts = [tuple(draft) for draft in np.stack(Blocks.all(batch()).answers(2), axis=1).tolist()]
    assert drafts == [
        *[(0, 1, 3), (0, 2, 4), (1, 1, 4), (1, 2, 5), (2, 1, 5)],
        *[(8, 1, 11), (9, 1, 15), (9, 2, 16), (10, 1, 16), (10, 2, 17), (11, 1, 17)],
    ]


def test_draft_k_is_k_places_behind_its_anchor_in_the_same_sequence():
    random = np.random.default_rng(5)
    for _ in range(50):
        lens = tuple(random.integers(1, 12, 5).tolist())
        learned = random.integers(0, 2, sum(lens)).astype(np.float32)
        batch = Batch(np.arange(sum(lens)), learned, lens)
        drafts, limit = int(random.integers(1, 6)), int(random.integers(1, 5))
        chosen = Blocks.draw(batch, limit, random)
        which, depths, places = chosen.answers(drafts)
        owner = np.repeat(np.arange(5), lens)
        anchors = chosen.tokens.flatten()[which]
        assert (places == anchors + depths).all() and (owner[places] == owner[anchors]).all()
        assert chosen.anchors.shape[1] <= limit and (depths <= drafts).all()
        for anchor, place in zip(anchors, places, strict=True):
            assert learned[anchor : place + 1].all()


def test_random_anchors_are_some_of_all_without_repetition():
    seen = set()
    for seed in range(20):
        blocks = Blocks.draw(batch(), 2, np.random.default_rng(seed))
        first, last = blocks.anchors[0].tolist(), blocks.anchors[2].tolist()
        assert first == sorted(set(first)) and last == sorted(set(last)) and blocks.anchors.shape == (3, 2)
        seen.update(last)
    assert seen == {1, 5, 6, 7}


def test_a_batch_without_an_answer_has_no_drafts():
    empty = Batch(np.arange(4), np.zeros(4, dtype=np.float32), (4,))
    assert len(Blocks.draw(empty, 2, np.random.default_rng(0)).answers(3)[0]) == 0
