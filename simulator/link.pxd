cimport cython


cdef class SimulatedLink:
    cdef object _copy_ns, _issue_ns
    cdef list _queues
    cdef object _in_flight
    cdef bint _record_copies, _note_landings
    cdef public long long ends_ns
    cdef public list landed, copies, landings
    cdef long long _started_ns, _slow_from_ns, _slow_to_ns
    cdef double _slow_ratio

    cpdef long long submit(self, object loads, long long now_ns)
    cpdef bint cancel(self, tuple key)
    cpdef advance(self, long long now_ns)
    cpdef land(self, object keys)
    cpdef list drain(self)
    cpdef _start(self, object load, long long start_ns)

    @cython.locals(start_ns="long long", end_ns="long long", now_ns="long long", submit_ns="long long")
    cpdef long long _work(self, long long until_ns, object awaited, Py_ssize_t left)

    @cython.locals(end_ns="long long", slow_from_ns="long long", left_ns="long long", slowed_ns="long long")
    cpdef long long _end_ns(self, long long start_ns, long long copy_ns)
