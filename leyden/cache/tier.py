"""Places for pages and states in host memory, and what is to be moved between there and the device. No torch.

The index (cache/prefix.py) decides what goes where; cache/store.py owns the bytes. In between stand the moves of the
next step. They obey the rule of the step's other copies: everything is read before anything is written. So a page of
the device may be given away as soon as its way out is planned, and a place here as soon as its way back is.

What is asked back in the very step that takes it out has not left yet: it is copied on the device.
"""

from leyden.types import Moves


class Tier:
    """Host slots 1..slots and host pages 1..pages; 0 means nowhere."""

    def __init__(self, slots: int, pages: int):
        self.slots, self.pages = slots, pages
        self.free_slots = list(range(slots, 0, -1))
        self.free_pages = list(range(pages, 0, -1))
        self.moved = dict.fromkeys(("pages_out", "pages_in", "states_out", "states_in"), 0)  # so far
        self._pages_out: dict[int, int] = {}  # host page -> page of the device
        self._states_out: dict[int, int] = {}
        self._pages_in: dict[int, int] = {}  # page of the device -> host page
        self._states_in: dict[int, int] = {}
        self._copies: dict[int, int] = {}  # page of the device -> the page that has its content

    def page_out(self, page: int) -> int:
        """Send a page here, to a place that is free -> the place."""
        far = self.free_pages.pop()
        self._pages_out[far] = page
        return far

    def state_out(self, slot: int) -> int:
        """Send a state here -> its place."""
        far = self.free_slots.pop()
        self._states_out[far] = slot
        return far

    def page_in(self, far: int, page: int) -> None:
        """Bring the content of a place back, to `page`."""
        if far in self._pages_out:
            self._copies[page] = self._pages_out[far]
        else:
            self._pages_in[page] = far

    def state_in(self, far: int, slot: int) -> None:
        """Bring back the state that lay in a place before this step; one that has not left yet: see `here`."""
        self._states_in[slot] = far

    def here(self, far: int) -> int:
        """The slot of the device from which the state of this place has not left yet; 0: it is not on the device."""
        return self._states_out.get(far, 0)

    def free_page(self, far: int) -> None:
        self._pages_out.pop(far, None)
        self.free_pages.append(far)

    def free_slot(self, far: int) -> None:
        self._states_out.pop(far, None)
        self.free_slots.append(far)

    def withdraw(self, slot: int, pages: list[int]) -> None:
        """What was to be brought to this slot and these pages is not wanted any more."""
        self._states_in.pop(slot, None)
        for page in pages:
            self._pages_in.pop(page, None)
            self._copies.pop(page, None)

    def take(self) -> tuple[Moves | None, list[tuple[int, int]]]:
        """The moves for the step that is launched now, and (page, page that receives its content) on the device."""
        copies = [(source, page) for page, source in self._copies.items() if source != page]
        moves = Moves(
            pages_out=[(page, far) for far, page in self._pages_out.items()],
            pages_in=[(far, page) for page, far in self._pages_in.items()],
            states_out=[(slot, far) for far, slot in self._states_out.items()],
            states_in=[(far, slot) for slot, far in self._states_in.items()],
        )
        for kind in self.moved:
            self.moved[kind] += len(getattr(moves, kind))
        for planned in (self._pages_out, self._pages_in, self._states_out, self._states_in, self._copies):
            planned.clear()
        return (moves if moves else None), copies

    def check(self, pages: list[int], slots: list[int]) -> None:
        """Assert the sums, given the places in use."""
        assert sorted([*self.free_pages, *pages]) == list(range(1, self.pages + 1)), "host pages lost or doubled"
        assert sorted([*self.free_slots, *slots]) == list(range(1, self.slots + 1)), "host slots lost or doubled"
        assert set(self._pages_out) <= set(pages) and set(self._states_out) <= set(slots), "a move to nobody"
