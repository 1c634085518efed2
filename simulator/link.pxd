cimport cython

from simulator.policies.plans cimport Load


cdef class CopyQueue:
    cdef readonly list loads
    cdef readonly list issued_ns
    cdef readonly Py_ssize_t head

    cdef drop_next(self)


cdef class SimulatedLink:
    cdef object _copy_ns
    cdef object _issue_ns
    cdef list _queues
    cdef long long _size_bytes
    cdef long long _size_copy_ns
    cdef long long _size_issue_ns
    cdef Load _in_flight
    cdef bint _record_copies
    cdef bint _note_landings
    cdef public long long ends_ns
    cdef public list landed
    cdef public list copies
    cdef public list landings
    cdef long long _started_ns
    cdef long long _slow_from_ns
    cdef long long _slow_to_ns
    cdef double _slow_ratio

    @cython.locals(load=Load, queue=CopyQueue)
    cpdef long long submit(self, loads, long long now_ns)
    @cython.locals(queue=CopyQueue, load=Load, place=Py_ssize_t)
    cpdef bint cancel(self, tuple key)
    cpdef advance(self, long long now_ns)
    @cython.locals(left=Py_ssize_t, key=tuple)
    cpdef long long land(self, keys)
    @cython.locals(landed=list)
    cpdef list drain(self)
    cpdef slow_down(self, long long from_ns, long long to_ns, double ratio)
    cdef _start(self, Load load, long long start_ns)
    @cython.locals(
        load=Load, start_ns="long long", end_ns="long long", landed=list, now_ns="long long", key=tuple,
        queue=CopyQueue, issued_ns="long long",
    )
    cdef long long _work(self, long long until_ns, awaited, Py_ssize_t left)
    @cython.locals(queue=CopyQueue)
    cdef CopyQueue _urgent_queue(self)
    cdef _look_up(self, long long num_bytes)
    cdef long long _end_ns(self, long long start_ns, long long copy_ns)
