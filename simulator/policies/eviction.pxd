cimport cython


cdef class Leavers:
    cpdef bint allow(self, tuple key)
    cpdef list kept_back(self)


cdef class CachePolicy:
    cdef public object partition

    cpdef admitted(self, tuple key)
    cpdef used(self, tuple key)
    cpdef removed(self, tuple key)
    cpdef choose_victim(self, Leavers leavers)
    cpdef all_admitted(self, list row, experts)
    cpdef all_used(self, list row, experts)
    @cython.locals(victims=list)
    cpdef list evict(self, Py_ssize_t count, Leavers leavers)
