cimport cython

from simulator.policies.placement cimport Asked, PlacementPolicy
from simulator.policies.utility cimport UtilitySignal


cdef class Balanced(PlacementPolicy):
    cdef UtilitySignal _signal
    cdef list _device_ns
    cdef list _cpu_ns
    cdef list _device_base_ns
    cdef list _cpu_base_ns
    cdef list _copy_ns
    cdef bint _is_longest
    cdef bint _loads_misses
    cdef object _fixed_tau
    cdef object _hot_from
    cdef bint _is_prefill
    cdef public Py_ssize_t max_admissions

    cpdef begin_pass(self, bint is_prefill)
    @cython.locals(levels=list, tau="long long", part=list, moves=bint, index=Py_ssize_t)
    cpdef cpu_part(self, Asked asked)
    @cython.locals(
        cells=bytearray, first=Py_ssize_t, places=bytearray, hot_from="long long", landed_place=int, levels=list,
        expert=Py_ssize_t, level=int,
    )
    cdef list _levels(self, Asked asked)
    @cython.locals(
        layer=Py_ssize_t, device_ns=list, cpu_ns=list, most="long long", count=Py_ssize_t, device="long long",
        cpu="long long", on_device=Py_ssize_t, index=Py_ssize_t, served="long long", best="long long",
        best_ns="long long", tau="long long", before=Py_ssize_t, cost_ns="long long",
    )
    cdef long long _threshold(self, Asked asked, list levels) except -1
    @cython.locals(
        layer=Py_ssize_t, places=bytearray, cells=bytearray, first=Py_ssize_t, device_ns=list, cpu_ns=list,
        most="long long", count=Py_ssize_t, device="long long", cpu="long long", on_device=Py_ssize_t, absent=list,
        index=Py_ssize_t, served="long long", expert=Py_ssize_t, best_ns="long long", loaded=list, less="long long",
        cost_ns="long long",
    )
    cdef frozenset _worth_loading(self, Asked asked, list levels)
    @cython.locals(longest_ns="long long")
    cdef long long _cost_ns(
        self, Py_ssize_t layer, long long device_ns, Py_ssize_t on_device, long long cpu_ns, Py_ssize_t on_cpu
    ) except -1
