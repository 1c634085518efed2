cimport cython

from simulator.durations cimport Durations
from simulator.link cimport SimulatedLink
from simulator.pass_reader cimport PassReader
from simulator.policies.core cimport OffloadCore
from simulator.policies.plans cimport Load, Wave


cdef class Spent:
    cdef long long predict_ns
    cdef long long decide_ns
    cdef long long issue_ns
    cdef long long stall_ns
    cdef long long experts_ns


cdef class Machine:
    cdef object _trace
    cdef readonly OffloadCore _core
    cdef bint _serial
    cdef PassReader _routed
    cdef object _predict
    cdef Durations _costs
    cdef list _predict_ns
    cdef long long _utility_ns
    cdef object _window
    cdef object _env
    cdef SimulatedLink _link
    cdef bint _record_spans
    cdef bint _explain
    cdef list _host_spans
    cdef list _uses
    cdef dict _terms
    cdef dict _stalls
    cdef object _experts
    cdef Py_ssize_t _num_tokens
    cdef list _tokens
    cdef Spent _spent
    cdef long long _now
    cdef long long _began_ns
    cdef long long _cpu_began_ns
    cdef long long _cpu_end_ns
    cdef public list passes
    cdef public list preloaded
    cdef object _ended

    @cython.locals(spent=Spent, terms_ns=dict)
    cpdef _end_pass(self, times, dense_ns)
    @cython.locals(dense_ns=list, predicted=list, executed=list, began_ns="long long", experts=list, layer=Py_ssize_t)
    cpdef _pass(self, item)
    @cython.locals(core=OffloadCore, link=SimulatedLink, is_first=bint, wave=Wave, dropped=tuple)
    cpdef _layer(self, item, Py_ssize_t layer, list experts, ahead)
    @cython.locals(start_ns="long long")
    cpdef _compute_experts(self, item, Py_ssize_t layer, Py_ssize_t count)
    @cython.locals(link=SimulatedLink)
    cpdef _catch_up(self)
    @cython.locals(decide_ns="long long")
    cpdef _host_work(self, item, Py_ssize_t layer, Wave wave, ahead, bint is_first)
    @cython.locals(predict_ns="long long", plan_ns="long long", loads=tuple)
    cpdef _prefetch(self, item, Py_ssize_t layer, ahead)
    cpdef _start_cpu(self, item, Py_ssize_t layer, Wave wave)
    cpdef _share_memory(self, Py_ssize_t layer)
    cpdef _join(self, item, Py_ssize_t layer)
    @cython.locals(now_ns="long long")
    cpdef _issue(self, tuple loads, item, Py_ssize_t layer)
    cpdef _end_host_work(self, item, Py_ssize_t layer)
    @cython.locals(landed_ns="long long", stalled_ns="long long", wakeup_ns="long long")
    cpdef _wait(self, item, Py_ssize_t layer, keys)
    cpdef _spend(self, str term, str track, long long duration_ns, item, Py_ssize_t layer)
    cpdef _span(self, str track, str kind, long long start_ns, long long end_ns, item, Py_ssize_t layer)
