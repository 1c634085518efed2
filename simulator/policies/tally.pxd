cimport cython

from simulator.policies.plans cimport Counters, Load


cdef class Tally:
    cdef public Counters prefill
    cdef public Counters warmup
    cdef public Counters decode
    cdef public Py_ssize_t warmup_passes
    cdef Py_ssize_t _decode_passes
    cdef bint _is_drafting
    cdef Counters _now
    cdef public object first_uses
    cdef list _unused
    cdef list _counted_in

    @cython.locals(counters=Counters, asked=Py_ssize_t, unused=bytearray, used=list, expert=Py_ssize_t)
    cpdef looked_up(self, Py_ssize_t layer, experts, list absent, Py_ssize_t late)
    cpdef ran_on_cpu(self, Py_ssize_t experts)
    @cython.locals(counters=Counters, unused=bytearray, count="long long", counted_in=list, expert=Py_ssize_t)
    cpdef loaded(self, Py_ssize_t layer, experts, long long expert_bytes, str reason, Py_ssize_t evicted)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, counters=Counters)
    cpdef cancelled(self, Load load)
    cpdef evicted(self, Py_ssize_t keys)
