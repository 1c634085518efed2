cdef class PrefetchPolicy:
    cpdef select(self, Py_ssize_t layer, predicted)


cdef class NoPrefetch(PrefetchPolicy):
    cpdef select(self, Py_ssize_t layer, predicted)


cdef class Predicted(PrefetchPolicy):
    cdef readonly object prediction

    cpdef select(self, Py_ssize_t layer, predicted)
