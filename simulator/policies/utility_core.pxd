cimport cython

from simulator.policies.core cimport OffloadCore
from simulator.policies.utility_loads cimport UtilityLoads


cdef class UtilityCore(OffloadCore):
    cdef public UtilityLoads hot
    cdef list _pools

    cpdef tuple layer_routed(self, Py_ssize_t layer, experts, tokens=*)
    cpdef list _plan_ahead(self, Py_ssize_t target, predicted)
    cpdef _plan_behind(self, list loads)
