from simulator.policies.core cimport OffloadCore


cdef class UtilityCore(OffloadCore):
    cdef public object hot
    cdef list _pools
