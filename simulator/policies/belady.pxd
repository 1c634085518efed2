cimport cython

from simulator.policies.frequency cimport ScoredPolicy
from simulator.policies.rank_heap cimport Rank


cdef class Belady(ScoredPolicy):
    cdef object _future
    cdef list _future_rows
    cdef long long _last_place

    @cython.locals(rank=Rank, expert=Py_ssize_t)
    cpdef routed(self, Py_ssize_t layer, experts, tokens=*)
    @cython.locals(rank=Rank)
    cpdef admitted(self, tuple key)
    @cython.locals(ranks=list, rank=Rank, expert=Py_ssize_t)
    cpdef all_admitted(self, list row, experts)
    cpdef used(self, tuple key)
    cpdef all_used(self, list row, experts)
    @cython.locals(future=list, place="long long")
    cdef long long _nearness(self, Rank rank) except -1
    @cython.locals(row=list)
    cdef list _future_of(self, Rank rank)
