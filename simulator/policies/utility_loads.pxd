cimport cython

from simulator.policies.plans cimport Load
from simulator.policies.utility cimport UtilitySignal
from simulator.policies.utility_cache cimport UtilityQueue


cdef class UtilityLoads:
    cdef object _config
    cdef readonly UtilitySignal _signal
    cdef readonly object _times
    cdef int _top
    cdef long long _most
    cdef list _ran
    cdef bint _always
    cdef public list thresholds
    cdef readonly list copy_ns
    cdef readonly UtilityQueue _queue
    cdef set _named

    cpdef routed(self, Py_ssize_t layer, experts, tokens, bytearray places)
    @cython.locals(left_ns="long long", layer=Py_ssize_t)
    cpdef long long balance(self, long long window_ns, free_bytes, list places, coming) except -1
    @cython.locals(expert=Py_ssize_t, queue=UtilityQueue)
    cpdef name(self, Py_ssize_t layer, experts, bytearray places)
    @cython.locals(
        loads=list, queue=UtilityQueue, limit="long long", has_time=bint, key=tuple, level=int, one=Load
    )
    cpdef list plan(self, load, window_ns, long long under_way)
    @cython.locals(least=int, cells=bytearray, first=Py_ssize_t, expert=Py_ssize_t)
    cpdef _ask(self, Py_ssize_t layer, bytearray places)
    @cython.locals(layer=Py_ssize_t, width=Py_ssize_t, cells=list, served=list)
    cpdef _frequencies(self)
