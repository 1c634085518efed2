cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers
from simulator.policies.seats cimport Seat, SeatQueue, SeatTable


cdef class Lru(CachePolicy):
    cdef SeatTable _table
    cdef SeatQueue _queue

    cpdef admitted(self, tuple key)
    cpdef used(self, tuple key)
    @cython.locals(seat=Seat)
    cpdef removed(self, tuple key)
    @cython.locals(seats=list, queue=SeatQueue, expert=Py_ssize_t)
    cpdef all_admitted(self, list row, experts)
    @cython.locals(seats=list, queue=SeatQueue, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)
    @cython.locals(victims=list, key=tuple)
    cpdef list evict(self, Py_ssize_t count, Leavers leavers)
    @cython.locals(queue=SeatQueue, place=Py_ssize_t, found=list, key=tuple)
    cdef list _oldest(self, Py_ssize_t count, Leavers leavers)


cdef class Random(CachePolicy):
    cdef object _random
    cdef list _keys
    cdef list _numbers
    cdef dict _number_of
    cdef Py_ssize_t _admissions

    cpdef admitted(self, tuple key)
    cpdef used(self, tuple key)
    cpdef all_used(self, list row, experts)
    @cython.locals(place=Py_ssize_t)
    cpdef removed(self, tuple key)
    @cython.locals(place=Py_ssize_t)
    cpdef choose_victim(self, Leavers leavers)
    @cython.locals(kept=list, victims=list, place=Py_ssize_t, victim=tuple)
    cpdef list evict(self, Py_ssize_t count, Leavers leavers)
    @cython.locals(place=Py_ssize_t, other=Py_ssize_t)
    cdef Py_ssize_t _draw(self, list kept) except -2
    @cython.locals(kept=list, numbers=list)
    cdef list _kept_places(self, Leavers leavers)
