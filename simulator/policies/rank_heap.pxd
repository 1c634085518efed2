cimport cython


@cython.final
cdef class Rank:
    cdef readonly Py_ssize_t layer
    cdef readonly Py_ssize_t expert
    cdef public long long score
    cdef public long long tick
    cdef public long long heap_score
    cdef public long long heap_tick
    cdef public Py_ssize_t place
    cdef public Py_ssize_t uses


@cython.locals(rank=Rank)
cpdef Rank make_rank(Py_ssize_t layer, Py_ssize_t expert)

cdef bint is_before(Rank one, Rank other) except -1


@cython.final
cdef class RankHeap:
    cdef readonly list ranks

    cpdef push(self, Rank rank)
    cpdef lower(self, Rank rank)
    cpdef correct(self, Rank rank)
    @cython.locals(place=Py_ssize_t, last=Rank)
    cpdef remove(self, Rank rank)
    @cython.locals(ranks=list, parent=Py_ssize_t, other=Rank)
    cdef _rise(self, Rank rank, Py_ssize_t place)
    @cython.locals(ranks=list, end=Py_ssize_t, child=Py_ssize_t, other=Rank, right=Rank)
    cdef _sink(self, Rank rank, Py_ssize_t place)
