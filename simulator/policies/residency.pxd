cimport cython

from simulator.policies.eviction cimport CachePolicy, Leavers
from simulator.policies.plans cimport Load, make_load


cpdef for_look_ups(items)


cdef class Unneeded(Leavers):
    cdef list _places
    cdef list _under_way
    cdef public Py_ssize_t layer
    cdef public object active

    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, places=bytearray)
    cpdef bint allow(self, tuple key)
    @cython.locals(kept=list, loads=list, load=Load)
    cpdef list kept_back(self)


cdef class Unforeseen(Leavers):
    cdef Unneeded _unneeded
    cdef object _experts
    cdef bytearray _is_foreseen

    @cython.locals(expert=Py_ssize_t)
    cpdef foresee(self, experts)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t)
    cpdef bint allow(self, tuple key)
    @cython.locals(kept=list)
    cpdef list kept_back(self)


cdef class Except(Leavers):
    cdef object _keys
    cdef Leavers _others

    cpdef bint allow(self, tuple key)
    @cython.locals(kept=list)
    cpdef list kept_back(self)


cdef class Residency:
    cdef public list expert_bytes
    cdef list _partition_of_layer
    cdef list _cache
    cdef public list places
    cdef public list under_way
    cdef public Py_ssize_t num_behind
    cdef public list free_bytes
    cdef public list key_of
    cdef list _evicts_ahead

    @cython.locals(places=bytearray, absent=list, expert=Py_ssize_t)
    cpdef list without_place(self, Py_ssize_t layer, experts)
    @cython.locals(
        partition=Py_ssize_t, size="long long", room=Py_ssize_t, count=Py_ssize_t, victims=list, gone=Py_ssize_t,
        row=list, places=bytearray, under_way=list, loads=list, evicts=tuple, expert=Py_ssize_t,
        policy=CachePolicy, load=Load,
    )
    cpdef tuple take(self, Py_ssize_t layer, experts, str reason, int priority, Leavers leavers)
    @cython.locals(key=tuple, places=bytearray, layer=Py_ssize_t, expert=Py_ssize_t)
    cpdef land(self, keys)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, places=bytearray, policy=CachePolicy)
    cpdef leave(self, tuple key)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, load=Load)
    cpdef Load coming_load(self, tuple key)
    @cython.locals(under_way=list, place=Py_ssize_t, load=Load, key=tuple)
    cdef Py_ssize_t _find_coming(self, Py_ssize_t layer, Py_ssize_t expert) except -1
    @cython.locals(under_way=list, place=Py_ssize_t, load=Load)
    cdef _withdraw(self, Py_ssize_t layer, Py_ssize_t expert)
    @cython.locals(keys=list, load=Load, key=tuple)
    cpdef tuple not_asked(self, Py_ssize_t layer, awaited)
    cpdef bint has_room(self, Py_ssize_t layer)
    cpdef list held(self, Py_ssize_t layer)
    @cython.locals(
        partition=Py_ssize_t, policy=CachePolicy, size="long long", row=list, places=bytearray, under_way=list,
        loads=list, evicted=Py_ssize_t, expert=Py_ssize_t, victims=tuple, load=Load,
    )
    cdef tuple _take_in_turn(self, Py_ssize_t layer, experts, str reason, int priority, Leavers leavers)
    @cython.locals(partition=Py_ssize_t, policy=CachePolicy, size="long long", freed="long long", victims=list, victim=tuple)
    cdef tuple _victims(self, Py_ssize_t layer, Leavers leavers)
