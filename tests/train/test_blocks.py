"""Which anchors a batch has, and which drafts of theirs have a right answer."""

import numpy as np

from leyden.train.batches import Batch
from leyden.train.blocks import ROW, Blocks

LENS = (6, 3, 9)
LEARNED = [0, 0, 1, 1, 1, 1] + [1, 1, 0] + [0, 1, 1, 0, 0, 1, 1, 1, 1]


def batch() -> Batch:
    return Batch(np.arange(100, 118), np.asarray(LEARNED, dtype=np.float32), LENS)


def rows(blocks: Blocks) -> list[list[tuple[int, int, int]]]:
    """(position, place, reach) of the blocks of every row."""
    fields = np.stack([blocks.anchors, blocks.tokens, blocks.reach], axis=-1)
    return [
        [tuple(block) for block in row[reach > 0].tolist()] for row, reach in zip(fields, blocks.reach, strict=True)
    ]


def test_anchors_are_learned_tokens_before_learned_tokens():
    blocks = Blocks.all(batch())
    assert blocks.sequences.tolist() == [0, 2]
    # 7 is the only learned token of its sequence that something precedes, and nothing learned follows it
    assert rows(blocks) == [[(2, 2, 3), (3, 3, 2), (4, 4, 1)], [(1, 10, 1), (5, 14, 3), (6, 15, 2), (7, 16, 1)]]


def test_drafts_end_with_the_answer():
    drafts = [tuple(draft) for draft in np.stack(Blocks.all(batch()).answers(2), axis=1).tolist()]
    assert drafts == [
        *[(0, 1, 3), (0, 2, 4), (1, 1, 4), (1, 2, 5), (2, 1, 5)],
        *[(ROW, 1, 11), (ROW + 1, 1, 15), (ROW + 1, 2, 16), (ROW + 2, 1, 16), (ROW + 2, 2, 17), (ROW + 3, 1, 17)],
    ]


def test_rows_hold_the_blocks_of_one_sequence_and_come_by_the_context_they_need():
    lens = (50, 3, 20, 90)
    blocks = Blocks.all(Batch(np.arange(163), np.ones(163, dtype=np.float32), lens))
    assert len(blocks.sequences) == 3 + 1 + 2 + 6 and blocks.anchors.shape[1] == ROW
    assert (blocks.reach > 0).sum() == 48 + 1 + 18 + 88
    owner = np.repeat(np.arange(4), lens)
    for row, (sequence, anchors) in enumerate(zip(blocks.sequences, rows(blocks), strict=True)):
        assert {int(owner[place]) for _, place, _ in anchors} == {int(sequence)}, row
    needed = blocks.anchors.max(1)
    assert (np.diff(needed) >= 0).all()
    spans = blocks.spans()
    assert [row for span, _ in spans for row in range(span.start, span.stop)] == list(range(12))
    for span, longest in spans:
        assert longest == needed[span].max() and (needed[span] * 2 > longest).all()
    parts = list(blocks.parts(5))
    assert [len(part.sequences) for part in parts] == [5, 5, 2]
    assert np.array_equal(np.concatenate([part.tokens for part in parts]), blocks.tokens)


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
        counts = np.bincount(chosen.sequences, (chosen.reach > 0).sum(1), minlength=5)
        assert (counts <= limit).all() and (depths <= drafts).all()
        for anchor, place in zip(anchors, places, strict=True):
            assert learned[anchor : place + 1].all()


def test_random_anchors_are_some_of_all_without_repetition():
    seen = set()
    for seed in range(20):
        blocks = Blocks.draw(batch(), 2, np.random.default_rng(seed))
        for row in rows(blocks):
            assert len(set(row)) == 2 and row == sorted(row)
        seen.update(position for position, place, _ in sum(rows(blocks), []) if place > 8)
    assert seen == {1, 5, 6, 7}


def test_a_batch_without_an_answer_has_no_drafts():
    empty = Batch(np.arange(4), np.zeros(4, dtype=np.float32), (4,))
    assert len(Blocks.draw(empty, 2, np.random.default_rng(0)).answers(3)[0]) == 0
