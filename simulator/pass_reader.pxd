cimport cython


cdef class PassReader:
    cdef object _trace
    cdef object _source
    cdef object _ids
    cdef Py_ssize_t _layers
    cdef Py_ssize_t _width
    cdef tuple _searched
    cdef Py_ssize_t _start
    cdef Py_ssize_t _stop
    cdef list _block

    @cython.locals(start=Py_ssize_t, block=list, place=Py_ssize_t, rows=list)
    cpdef list read(self, item)
