cimport cython


@cython.final
cdef class Load:
    cdef readonly tuple key
    cdef readonly long long num_bytes
    cdef readonly str reason
    cdef readonly int priority
    cdef readonly tuple evicts

    cpdef tuple _fields(self)


@cython.final
cdef class Wave:
    cdef readonly tuple experts
    cdef readonly tuple loads
    cdef readonly tuple wait
    cdef readonly tuple cpu_experts

    cpdef tuple _fields(self)


@cython.locals(load=Load)
cpdef Load make_load(tuple key, long long num_bytes, str reason, int priority, tuple evicts)
@cython.locals(wave=Wave)
cpdef Wave make_wave(tuple experts, tuple loads, tuple wait, tuple cpu_experts)


@cython.final
cdef class Counters:
    cdef public long long lookups
    cdef public long long hits
    cdef public long long late
    cdef public long long demand_loads
    cdef public long long prefetch_loads
    cdef public long long prefetch_used
    cdef public long long evictions
    cdef public long long bytes_loaded
    cdef public long long cpu_runs
    cdef public long long admission_loads
