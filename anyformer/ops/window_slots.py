"""Where the tiles of a window find their keys: in place, but for the ends, where windows reach beyond the keys."""

from typing import NamedTuple

from torch import Tensor

from anyformer.ops.tile import Scratch

LEFT, INSIDE, RIGHT = 0, 1, 2


class Slots(NamedTuple):
    """One head's keys or values, or their gradient, by slot.

    Args:
        parts: rows of consecutive slots: those at the left end, those inside, those at the right end.
        firsts: the number of the first slot of each.
    """

    parts: tuple[Tensor, Tensor, Tensor]
    firsts: tuple[int, int, int]

    @staticmethod
    def whole(slots: Tensor) -> "Slots":
        """All slots [slots d] in one buffer."""
        return Slots((slots, slots, slots), (0, 0, 0))

    def ends(self) -> list[tuple[Tensor, int]]:
        """The slots at both ends and the number of the first of each."""
        return [(self.parts[at], self.firsts[at]) for at in (LEFT, RIGHT)]

    def windows(self, part: int, first: int, count: int, span: int, step: int) -> Tensor:
        """A view [count span d] of the windows that begin at the slots first, first + step, ..., each `span` long."""
        rows, (stride, _) = self.parts[part], self.parts[part].stride()
        start = rows.storage_offset() + (first - self.firsts[part]) * stride
        return rows.as_strided((count, span, rows.shape[1]), (step * stride, stride, 1), start)

    def run(self, part: int, first: int, count: int) -> Tensor:
        """A view [count d] of consecutive slots."""
        return self.parts[part].narrow(0, first - self.firsts[part], count)


class Strip:
    """`count` slots, of which the first `globals` belong to no place; key j lies in slot j + shift where that is one of the others.

    A head's keys need no copy in this order: only the two ends, `left` slots and those from `right` on, get room of their own, and
    that only where they are the smaller part.
    """

    def __init__(self, m: int, globals: int, count: int, shift: int, scratch: Scratch):
        self.count, self.globals, self.shift, self.scratch = count, globals, shift, scratch
        self.first = max(0, globals - shift)
        self.last = max(self.first, min(m, count - shift))
        self.left, self.right = globals, count

    def part(self, start: int, stop: int) -> int:
        """Which part these slots are read from; those of an end make room for them."""
        if start < self.first + self.shift:
            self.left = max(self.left, stop)
            return LEFT
        if stop > self.last + self.shift:
            self.right = min(self.right, start)
            return RIGHT
        return INSIDE

    def load(self, keys: Tensor, name: str, global_keys: Tensor | None, *, copied: bool) -> Slots:
        """The slots of keys [m d], the first ones of those with the numbers `global_keys` [g].

        Args:
            copied: in one buffer of their own, which may be written to.
        """
        if copied or not self._in_place(keys):
            return Slots.whole(self.fill(self.scratch.take(name, self.count, keys.shape[1]), keys, global_keys))
        slots = self._around(keys, name)
        for room, start in slots.ends():
            self._fill(room, start, keys)
        self._fill_globals(slots.parts[LEFT], keys, global_keys)
        return slots

    def room(self, keys: Tensor, name: str) -> Slots:
        """Slots of zeros, whose sum for each key [m d] `unload` writes."""
        if not self._in_place(keys):
            return Slots.whole(self.scratch.take(name, self.count, keys.shape[1]).zero_())
        slots = self._around(keys, name)
        for part in slots.parts:
            part.zero_()
        return slots

    def unload(self, slots: Slots, keys: Tensor, global_keys: Tensor | None) -> None:
        """Write what the slots hold to keys [m d]."""
        if slots.parts[INSIDE] is keys:
            total = keys
            for room, start in slots.ends():
                self._add(room, start, total)
        else:
            total = self.scratch.take("unload", *keys.shape).zero_()
            self._add(slots.parts[LEFT], 0, total)
        if global_keys is not None:
            total.index_add_(0, global_keys.clamp(min=0), slots.parts[LEFT][: self.globals])
        if total is not keys:
            keys.copy_(total)

    def fill(self, slots: Tensor, keys: Tensor, global_keys: Tensor | None) -> Tensor:
        """All slots in one buffer [slots d], filled; zeros where there is no key."""
        self._fill_globals(self._fill(slots, 0, keys), keys, global_keys)
        return slots

    def _in_place(self, keys: Tensor) -> bool:
        """Whether the inside can be worked on where it is in [m d]."""
        small = 2 * (self.left + self.count - self.right) < self.count
        return small and keys.dtype == self.scratch.dtype and keys.is_contiguous()

    def _around(self, keys: Tensor, name: str) -> Slots:
        """Uninitialised ends around an inside that stays where it is in [m d]."""
        width = keys.shape[1]
        left = self.scratch.take(f"{name} left", self.left, width)
        right = self.scratch.take(f"{name} right", self.count - self.right, width)
        return Slots((left, keys, right), (0, self.shift, self.right))

    def _fill(self, room: Tensor, start: int, keys: Tensor) -> Tensor:
        """Fill the slots from `start` on with keys [m d], zeros where there is none."""
        low, high = self._held(room, start)
        room[:low].zero_()
        room[low:high] = keys[low + start - self.shift : high + start - self.shift]
        room[high:].zero_()
        return room

    def _fill_globals(self, slots: Tensor, keys: Tensor, global_keys: Tensor | None) -> None:
        if global_keys is not None:
            slots[: self.globals].copy_(keys[global_keys.clamp(min=0)])

    def _add(self, room: Tensor, start: int, keys: Tensor) -> None:
        """Add what the slots from `start` on hold to keys [m d]."""
        low, high = self._held(room, start)
        keys[low + start - self.shift : high + start - self.shift].add_(room[low:high])

    def _held(self, room: Tensor, start: int) -> tuple[int, int]:
        """Which rows of the room hold a key."""
        low = min(max(self.first + self.shift - start, 0), room.shape[0])
        return low, max(low, min(self.last + self.shift - start, room.shape[0]))
