"""One forward pass at a time: threads that share an offloaded model take turns, and nobody waits for the dead."""

from __future__ import annotations

import threading


class Turns:
    """A lock that its holder may take again, that anyone may take from a thread that has ended, and that is given
    back without counting: a pass that was broken off leaves nothing behind."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._holder: threading.Thread | None = None

    def take(self) -> None:
        """Wait until no other living thread is in a pass."""
        me = threading.current_thread()
        with self._free:
            while self._holder not in (None, me) and self._holder_lives():
                self._free.wait(timeout=0.5)
            self._holder = me

    def give(self) -> None:
        """The pass is over, well or not; does nothing for a thread that does not hold the turn."""
        with self._free:
            if self._holder is threading.current_thread():
                self._holder = None
                self._free.notify()

    def _holder_lives(self) -> bool:
        return self._holder is not None and self._holder.is_alive()
