cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers


@cython.final
cdef class Rank:
    cdef readonly Py_ssize_t number
    cdef public long long score
    cdef public long long tick
    cdef public long long entry_score
    cdef public long long entry_tick
    cdef public Py_ssize_t uses


@cython.locals(rank=Rank)
cdef Rank make_rank(Py_ssize_t number)


cdef class ScoredPolicy(CachePolicy):
    cdef readonly list _heap
    cdef list _entries
    cdef list _ranks
    cdef list _keys
    cdef list _rows
    cdef Py_ssize_t _held
    cdef long long _tick

    cpdef score(self, tuple key, long long score)
    @cython.locals(rank=Rank)
    cpdef removed(self, tuple key)
    @cython.locals(key=tuple, rank=Rank)
    cpdef choose_victim(self, Leavers leavers)
    @cython.locals(victims=list, key=tuple)
    cpdef list evict(self, Py_ssize_t count, Leavers leavers)
    cdef _score(self, Rank rank, long long score)
    cdef object _make_entry(self, Rank rank)
    @cython.locals(heap=list, entries=list, found=list, aside=list, number=Py_ssize_t, rank=Rank, key=tuple)
    cdef list _take_lowest(self, Py_ssize_t count, Leavers leavers)
    @cython.locals(layer=Py_ssize_t, ranks=list, rank=Rank)
    cdef list _ranks_of(self, list row)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, ranks=list)
    cdef Rank _rank_of(self, tuple key)


cdef class Lfu(ScoredPolicy):
    @cython.locals(rank=Rank)
    cpdef admitted(self, tuple key)
    @cython.locals(rank=Rank)
    cpdef used(self, tuple key)
    @cython.locals(ranks=list, rank=Rank, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)


cdef class LfuAgeing(ScoredPolicy):
    cdef long long _age

    @cython.locals(rank=Rank)
    cpdef admitted(self, tuple key)
    @cython.locals(rank=Rank)
    cpdef used(self, tuple key)
    @cython.locals(ranks=list, rank=Rank, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)
    @cython.locals(rank=Rank)
    cpdef removed(self, tuple key)
