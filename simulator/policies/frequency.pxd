cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers
from simulator.policies.rank_heap cimport Rank, RankHeap, make_rank


cdef class ScoredPolicy(CachePolicy):
    cdef readonly RankHeap _heap
    cdef list _rows
    cdef list _ranks
    cdef long long _tick

    cpdef score(self, tuple key, long long score)
    @cython.locals(rank=Rank)
    cpdef removed(self, tuple key)
    @cython.locals(lowest=list, rank=Rank)
    cpdef choose_victim(self, Leavers leavers)
    @cython.locals(victims=list, rank=Rank)
    cpdef list evict(self, Py_ssize_t count, Leavers leavers)
    cdef _left(self, Rank rank)
    cdef _score(self, Rank rank, long long score)
    @cython.locals(heap=RankHeap, ranks=list, found=list, aside=list, rank=Rank)
    cdef list _take_lowest(self, Py_ssize_t count, Leavers leavers)
    @cython.locals(layer=Py_ssize_t, ranks=list, expert=Py_ssize_t)
    cdef list _ranks_of(self, list row)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, ranks=list)
    cdef Rank _rank_of(self, tuple key)
    @cython.locals(row=list)
    cdef tuple _key_of(self, Rank rank)


cdef class Lfu(ScoredPolicy):
    @cython.locals(rank=Rank)
    cpdef admitted(self, tuple key)
    @cython.locals(ranks=list, rank=Rank, expert=Py_ssize_t)
    cpdef all_admitted(self, list row, experts)
    @cython.locals(rank=Rank)
    cpdef used(self, tuple key)
    @cython.locals(ranks=list, rank=Rank, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)


cdef class LfuAgeing(ScoredPolicy):
    cdef long long _age

    @cython.locals(rank=Rank)
    cpdef admitted(self, tuple key)
    @cython.locals(ranks=list, rank=Rank, expert=Py_ssize_t)
    cpdef all_admitted(self, list row, experts)
    @cython.locals(rank=Rank)
    cpdef used(self, tuple key)
    @cython.locals(ranks=list, rank=Rank, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)
    cdef _left(self, Rank rank)
