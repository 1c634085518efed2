cimport cython

from simulator.policies.frequency cimport Rank, ScoredPolicy


cdef class Belady(ScoredPolicy):
    cdef object _uses
    cdef list _pending

    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t)
    cpdef admitted(self, tuple key)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t)
    cpdef used(self, tuple key)
    @cython.locals(ranks=list, layer=Py_ssize_t, rank=Rank, expert=Py_ssize_t)
    cpdef all_used(self, list row, experts)
    cdef long long _nearness(self, Py_ssize_t layer, Py_ssize_t expert)
    @cython.locals(row=list)
    cdef _pending_of(self, Py_ssize_t layer, Py_ssize_t expert)
