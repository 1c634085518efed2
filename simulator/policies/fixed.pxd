cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers
from simulator.policies.recency cimport Lru


cdef class Resident(CachePolicy):
    cpdef admitted(self, tuple key)
    cpdef used(self, tuple key)
    cpdef all_used(self, list row, experts)
    cpdef removed(self, tuple key)
    cpdef choose_victim(self, Leavers leavers)


cdef class StaticPopularity(CachePolicy):
    cdef dict _rank
    cdef list _hot
    cdef set _kept
    cdef Lru _passing

    cpdef admitted(self, tuple key)
    cpdef used(self, tuple key)
    cpdef removed(self, tuple key)
    @cython.locals(key=tuple, rank=Py_ssize_t, coldest=Py_ssize_t)
    cpdef choose_victim(self, Leavers leavers)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, row=bytearray)
    cdef bint _is_hot(self, tuple key)
