cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers
from simulator.policies.seats cimport Seat, SeatQueue, SeatTable


cdef class S3Fifo(CachePolicy):
    cdef Py_ssize_t _slots
    cdef Py_ssize_t _small_slots
    cdef Py_ssize_t _max_uses
    cdef SeatTable _table
    cdef SeatQueue _small
    cdef SeatQueue _main
    cdef SeatQueue _ghost

    @cython.locals(seat=Seat)
    cpdef admitted(self, tuple key)
    @cython.locals(seats=list, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)
    @cython.locals(seat=Seat)
    cpdef removed(self, tuple key)
    cpdef choose_victim(self, Leavers leavers)
    cdef _count(self, Seat seat)
    @cython.locals(ghost=SeatQueue)
    cdef _remember(self, Seat seat)
    @cython.locals(small=SeatQueue, place=Py_ssize_t, seat=Seat, key=tuple)
    cdef _from_small(self, Leavers leavers)
    @cython.locals(main=SeatQueue, place=Py_ssize_t, seat=Seat, key=tuple)
    cdef _from_main(self, Leavers leavers)
