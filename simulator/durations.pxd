cimport cython


cdef class Durations:
    cdef object _model
    cdef object _compute
    cdef long long _layers
    cdef long long _experts
    cdef readonly object dense_of_layers_ns
    cdef readonly object dense_parts_ns
    cdef readonly object overhead_ns
    cdef readonly object sharing
    cdef readonly long long plan_ns
    cdef readonly long long decide_utility_ns
    cdef readonly object verify_overhead_ns
    cdef readonly dict copy_ns
    cdef readonly dict issue_ns
    cdef readonly object cpu_experts_ns
    cdef readonly object contention
    cdef readonly object drafting_ns
    cdef long long _constant_wakeup_ns
    cdef list _decide_ns
    cdef dict _experts_ns

    cpdef long long wakeup_ns(self, long long stall_ns)
    cpdef long long decide_ns(self, Py_ssize_t loads)
    cpdef long long submit_ns(self, Py_ssize_t loads)
    @cython.locals(asked="long long")
    cpdef long long experts_ns(self, Py_ssize_t layer, long long tokens, Py_ssize_t experts, Py_ssize_t active)
