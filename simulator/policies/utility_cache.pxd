cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers
from simulator.policies.utility cimport UtilitySignal


@cython.final
cdef class Place:
    cdef readonly Py_ssize_t expert
    cdef readonly int state
    cdef readonly long long last_use
    cdef readonly long long rank
    cdef readonly long long tick
    cdef readonly bint is_held


@cython.final
cdef class Shelf:
    cdef readonly list row
    cdef readonly list places
    cdef readonly list held
    cdef readonly Place coldest


cdef class UtilityCache(CachePolicy):
    cdef readonly UtilitySignal _signal
    cdef public int threshold
    cdef long long _uses
    cdef long long _tick
    cdef long long _step
    cdef readonly list _shelves
    cdef dict _shelf_of_layer

    @cython.locals(shelf=Shelf, place=Place, cells=bytearray, first=Py_ssize_t)
    cpdef routed(self, Py_ssize_t layer, experts, tokens=*)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t)
    cpdef admitted(self, tuple key)
    @cython.locals(expert=Py_ssize_t)
    cpdef all_admitted(self, list row, experts)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, shelf=Shelf, place=Place)
    cpdef removed(self, tuple key)
    @cython.locals(victim=tuple, rank="long long", tick="long long", shelf=Shelf, place=Place)
    cpdef choose_victim(self, Leavers leavers)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, place=Place)
    cpdef int state(self, tuple key) except -1
    @cython.locals(found=Place, place=Place, rank="long long")
    cdef Place _coldest(self, Shelf shelf)
    @cython.locals(found=Place, place=Place)
    cdef Place _coldest_of(self, Shelf shelf, Leavers leavers, long long rank, long long tick)
    @cython.locals(shelf=Shelf, place=Place)
    cdef _admit(self, Py_ssize_t layer, Py_ssize_t expert)
    @cython.locals(shelf=Shelf, place=Place, places=list, cells=bytearray, first=Py_ssize_t, expert=Py_ssize_t)
    cdef _use(self, Py_ssize_t layer, experts)
    cdef _rank(self, Place place, int state)
    @cython.locals(shelf=Shelf)
    cdef Shelf _shelf_of(self, Py_ssize_t layer)


cdef class UtilityQueue:
    cdef readonly int predicted_level
    cdef list _heap
    cdef readonly dict _current
    cdef dict _of_layer
    cdef long long _tick

    cpdef push(self, tuple key, int level)
    @cython.locals(rank=int, tick="long long", key=tuple)
    cpdef tuple pop(self, int threshold)
    @cython.locals(key=tuple)
    cpdef drop_layer(self, Py_ssize_t layer)
