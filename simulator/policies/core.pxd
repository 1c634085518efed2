cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers
from simulator.policies.placement cimport PlacementPolicy, make_asked
from simulator.policies.plans cimport Load, Wave, make_wave
from simulator.policies.prefetch cimport PrefetchPolicy
from simulator.policies.residency cimport Residency, Unforeseen, Unneeded, for_look_ups
from simulator.policies.tally cimport Tally


cdef class OffloadCore:
    cdef list _partition_of_layer
    cdef Residency _residency
    cdef list _places
    cdef readonly list _cache
    cdef list _expires
    cdef list _hears
    cdef readonly PrefetchPolicy prefetch
    cdef bint _observes
    cdef object _max_prefetch
    cdef public tuple modes
    cdef public PlacementPolicy placement
    cdef public bint needs_token_counts
    cdef object _cpu_layers
    cdef bint _splits
    cdef public object log
    cdef Unneeded _unneeded
    cdef Unforeseen _unforeseen
    cdef object _remaining
    cdef list _awaited
    cdef list _absent
    cdef tuple _wave
    cdef tuple _cpu_part
    cdef tuple _missed
    cdef Py_ssize_t _layer
    cdef bint _prefill
    cdef public object preloaded
    cdef public bint streams_prefill
    cdef public Tally tally

    cpdef tuple preload(self)
    cpdef begin_pass(self, bint is_prefill)
    cpdef tuple drafting_begins(self, long long window_ns)
    cpdef all_landed(self, keys)
    cpdef cancelled(self, tuple key)
    @cython.locals(partition=Py_ssize_t, late=Py_ssize_t, policy=CachePolicy)
    cpdef tuple layer_routed(self, Py_ssize_t layer, experts, tokens=*)
    @cython.locals(
        cpu_experts=tuple, layer=Py_ssize_t, row=list, places=bytearray, experts=tuple, loads=tuple, wait=list,
        expert=Py_ssize_t, policy=CachePolicy, wave=Wave,
    )
    cpdef Wave next_wave(self)
    @cython.locals(target=Py_ssize_t, loads=list)
    cpdef tuple plan_prefetch(self, predicted)
    cpdef wave_done(self)
    @cython.locals(partition=Py_ssize_t)
    cpdef tuple layer_done(self)
    cpdef bint is_landed(self, tuple key)
    @cython.locals(places=bytearray, awaited=list, absent=list, expert=Py_ssize_t, place=int, landed_place=int)
    cpdef _remain(self, experts)
    @cython.locals(remaining=list)
    cpdef _drop_of_remaining(self, experts)
    @cython.locals(absent=list, is_hint=bint, priority=int)
    cpdef list _plan_ahead(self, Py_ssize_t target, predicted)
    @cython.locals(places=bytearray, policy=CachePolicy, row=list, expert=Py_ssize_t)
    cpdef _place(self, Py_ssize_t layer, experts, tokens)
    cpdef _plan_behind(self, list loads)
    cpdef _admit(self, list loads)
    @cython.locals(loads=list, evicted=Py_ssize_t, size="long long")
    cpdef list _load(self, Py_ssize_t layer, experts, str reason, int priority, Leavers leavers)
