"""Slots beside whose states tokens wait, as the host knows them: those that single-token steps brought further.

Only such a step can read a state with tokens beside it. Everybody else (prompt chunks, steps with drafts, snapshots,
copies, host memory, the saved cache) gets states into which they were folded, so that none of them has to know. What is
folded early is rounded early: with states of 16 bits a text may depend on when that was.
"""

from collections.abc import Iterable

from leyden.cache.pool import Pool
from leyden.engine.transfer import upload
from leyden.model.nemotron import Nemotron
from leyden.types import Plan, Row


class Waiting:
    """One model with its pool. Where the pool has no period no tokens ever wait."""

    def __init__(self, model: Nemotron, pool: Pool):
        self._model, self._pool = model, pool
        self._slots: set[int] = set()

    def settle(self, plan: Plan) -> None:
        """Before the diff of a plan is carried out: fold what is copied from, forget what is copied to."""
        if not self._slots:
            return
        read = [admit.source for admit in plan.admits]
        if plan.moves is not None:
            read += [slot for slot, _ in plan.moves.states_out]
        self.fold(read)
        self._slots.difference_update(admit.slot for admit in plan.admits)
        self._slots.difference_update(target for _, target in plan.snapshots)

    def begin(self, rows: list[Row]) -> None:
        """Before rows run: single tokens without guesses beside them may wait; of the other rows nothing does."""
        if self._pool.shape.period == 1:
            return
        guesses = any(row.drafts for row in rows)
        single = {row.slot for row in rows if row.n == 1 and not guesses}
        self.fold(row.slot for row in rows if row.slot not in single)
        if new := single - self._slots:
            self._pool.begin(upload(sorted(new), self._pool.committed.device))
            self._slots |= new

    def fold(self, slots: Iterable[int] | None = None) -> None:
        """Bring the states of slots, None: of all, to where the sequences are."""
        due = self._slots.intersection(self._slots if slots is None else slots)
        if due:
            self._model.fold(self._pool, upload(sorted(due), self._pool.committed.device))
            self._slots -= due
