cimport cython


@cython.locals(misses=list, place=Py_ssize_t, layer=Py_ssize_t, asked=Py_ssize_t, memory=PerfectMemory)
cpdef list _misses_of_pass(list lengths, list ids, list codes, list of_layer)


cdef class PerfectMemory:
    cdef long long _free_bytes
    cdef long long[::1] _code_of
    cdef long long _total
    cdef long long _num_experts
    cdef list _expert_bytes
    cdef list _heap
    cdef list _unasked
    cdef Py_ssize_t _head
    cdef long long[::1] _unasked_at
    cdef bytearray _pinned
    cdef Py_ssize_t _held

    cpdef preload(self, Py_ssize_t number, code)
    @cython.locals(missing=list, at=Py_ssize_t, number=Py_ssize_t, num_missing=Py_ssize_t, waiting=Py_ssize_t)
    cpdef Py_ssize_t ask(self, list ids, list codes, Py_ssize_t place, Py_ssize_t stop)
    @cython.locals(value="long long", entry=object, kept=list)
    cdef _use(self, Py_ssize_t number, code)
    @cython.locals(size="long long", free="long long", victims=list, victim=Py_ssize_t)
    cdef bint _make_room(self, Py_ssize_t newcomer)
    @cython.locals(number=Py_ssize_t, code="long long", is_current=bint)
    cdef Py_ssize_t _farthest(self)
    @cython.locals(unasked=list, number=Py_ssize_t, at=Py_ssize_t)
    cdef _restore(self, list victims)
