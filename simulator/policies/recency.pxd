cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers


@cython.final
cdef class Seat:
    cdef readonly Py_ssize_t layer
    cdef readonly Py_ssize_t expert
    cdef public Py_ssize_t place


@cython.locals(seat=Seat)
cdef Seat make_seat(Py_ssize_t layer, Py_ssize_t expert)


cdef class Lru(CachePolicy):
    cdef list _seats
    cdef list _rows
    cdef list _queue
    cdef Py_ssize_t _head
    cdef Py_ssize_t _held

    @cython.locals(seat=Seat)
    cpdef admitted(self, tuple key)
    @cython.locals(seat=Seat)
    cpdef removed(self, tuple key)
    @cython.locals(seats=list, queue=list, seat=Seat, expert=Py_ssize_t)
    cpdef all_admitted(self, list row, experts)
    @cython.locals(seats=list, queue=list, seat=Seat, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)
    @cython.locals(victims=list, layer=Py_ssize_t, expert=Py_ssize_t, seats=list, seat=Seat)
    cpdef list evict(self, Py_ssize_t count, Leavers leavers)
    @cython.locals(queue=list, place=Py_ssize_t, first=Py_ssize_t, found=list, seat=Seat, key=tuple)
    cdef list _oldest(self, Py_ssize_t count, Leavers leavers)
    @cython.locals(queue=list, kept=list, seat=Seat, place=Py_ssize_t)
    cdef _tidy(self)
    cdef _enqueue(self, Seat seat)
    @cython.locals(layer=Py_ssize_t, seats=list, expert=Py_ssize_t)
    cdef list _seats_of(self, list row)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, seats=list)
    cdef Seat _seat_of(self, tuple key)
