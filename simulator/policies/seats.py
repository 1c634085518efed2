"""What an eviction policy notes of each expert, found by layer and expert without hashing its key."""

from __future__ import annotations

from collections.abc import Sequence

from simulator.policies.eviction import Key


class Seat:
    """An expert in a queue; of numbers alone, so that the garbage collector never looks at it.

    Attributes:
        layer, expert: its key.
        place: of its entry that counts in the queue; -1: it is in none.
        queue: which one, where a policy has several.
        uses: as far as the policy counts them.
    """

    __slots__ = ("expert", "layer", "place", "queue", "uses")
    layer: int
    expert: int
    place: int
    queue: int
    uses: int


def make_seat(layer: int, expert: int) -> Seat:
    """Of an expert that is in no queue."""
    seat = Seat.__new__(Seat)
    seat.layer, seat.expert, seat.place, seat.queue, seat.uses = layer, expert, -1, 0, 0
    return seat


class SeatTable:
    """The seats of experts, per layer, as far as they were asked for."""

    def __init__(self) -> None:
        self._seats: list[list[Seat]] = []
        self._rows: list[Sequence[Key]] = []
        """Keys by layer and expert, likewise."""

    def of_row(self, row: Sequence[Key]) -> list[Seat]:
        """The seats of a layer whose keys are `row`, or of more than that."""
        layer = row[0][0]
        while len(self._seats) <= layer:
            self._seats.append([])
            self._rows.append(())
        seats = self._seats[layer]
        if len(seats) < len(row):
            self._rows[layer] = row
            for expert in range(len(seats), len(row)):
                seats.append(make_seat(layer, expert))
        return seats

    def find(self, key: Key) -> Seat:
        """The seat of one expert."""
        layer, expert = key
        if layer >= len(self._seats) or expert >= len(self._seats[layer]):
            self.of_row([(layer, other) for other in range(expert + 1)])
        seats = self._seats[layer]
        return seats[expert]

    def key_of(self, seat: Seat) -> Key:
        """The key of an expert, made once."""
        row = self._rows[seat.layer]
        return row[seat.expert]


class SeatQueue:
    """First in, first out. An entry counts while its seat says that it stands there; those that do not are left out
    when most do not, which takes less time than taking each out.

    Args:
        number: what `Seat.queue` says of those in it.

    Attributes:
        entries: in order; see `counts`.
        head: before it no entry counts.
        held: how many count.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.entries: list[Seat] = []
        self.head = 0
        self.held = 0

    def append(self, seat: Seat) -> None:
        """One that is in no queue enters at the end."""
        seat.queue, seat.place = self.number, len(self.entries)
        self.entries.append(seat)
        self.held += 1

    def drop(self, seat: Seat) -> None:
        """One leaves, wherever it stands."""
        seat.queue, seat.place = 0, -1
        self.held -= 1

    def requeue(self, seat: Seat) -> None:
        """One moves to the end.

        Raises:
            KeyError: it is not in this queue.
        """
        if seat.place < 0 or seat.queue != self.number:
            raise KeyError(f"expert {seat.expert} of MoE layer {seat.layer} is not in the queue")
        seat.place = len(self.entries)
        self.entries.append(seat)

    def counts(self, place: int) -> bool:
        """Whether the entry at a place counts."""
        seat = self.entries[place]
        return seat.place == place and seat.queue == self.number

    def first(self) -> int:
        """The place of the first entry that counts, or the end."""
        while self.head < len(self.entries) and not self.counts(self.head):
            self.head += 1
        return self.head

    def tidy(self) -> None:
        """Leave out the entries that do not count, once they are many; places change."""
        if len(self.entries) <= 4 * self.held + 64:
            return
        kept: list[Seat] = []
        for place in range(self.head, len(self.entries)):
            if self.counts(place):
                seat = self.entries[place]
                seat.place = len(kept)
                kept.append(seat)
        self.entries, self.head = kept, 0
