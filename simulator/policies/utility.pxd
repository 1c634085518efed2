cimport cython


@cython.final
cdef class Fluctuations:
    cdef public long long risen
    cdef public long long fallen
    cdef public long long num_risen
    cdef public long long num_fallen
    cdef public long long num_hot


cdef class BoundaryRule:
    cdef readonly long long most
    cdef tuple _capacity
    cdef public list boundaries

    cpdef calibrate(self, Py_ssize_t layer, Fluctuations seen)
    @cython.locals(old_up="long long", old_down="long long")
    cdef _set(self, Py_ssize_t layer, long long up, long long down)
    cdef long long _clamped(self, double value) except? -1


cdef class FluctuationRule(BoundaryRule):
    cdef list _usual_rise
    cdef list _usual_fall

    @cython.locals(rise=double, fall=double, rate=double)
    cpdef calibrate(self, Py_ssize_t layer, Fluctuations seen)


cdef class CapacityRule(BoundaryRule):
    @cython.locals(up="long long", down="long long", room="long long", surplus="long long")
    cpdef calibrate(self, Py_ssize_t layer, Fluctuations seen)


cdef class UtilitySignal:
    cdef readonly int top
    cdef readonly Py_ssize_t num_experts
    cdef readonly bytearray cells
    cdef list _warm

    cpdef int state(self, Py_ssize_t layer, Py_ssize_t expert) except -1
    cpdef route(self, Py_ssize_t layer, experts, tokens)
    cpdef count(self, Py_ssize_t layer, experts, tokens)


cdef class SpeculativeUtility(UtilitySignal):
    cdef readonly BoundaryRule rule
    cdef bytearray _is_used
    cdef Fluctuations _seen

    @cython.locals(is_used=bytearray, expert=Py_ssize_t, seen=Fluctuations, warm=list)
    cpdef count(self, Py_ssize_t layer, experts, tokens)
    @cython.locals(
        cells=bytearray, is_used=bytearray, first=Py_ssize_t, down="long long", fallen="long long",
        num_fallen="long long", warm=list, expert=Py_ssize_t, state=int,
    )
    cdef list _cool(self, Py_ssize_t layer, Fluctuations seen)
    @cython.locals(
        cells=bytearray, most="long long", top="long long", up="long long", down="long long", first=Py_ssize_t,
        risen="long long", num_risen="long long", place=Py_ssize_t, expert=Py_ssize_t, frequency="long long",
        state=int, fluctuation="long long",
    )
    cdef _move(self, Py_ssize_t layer, experts, tokens, list warm, Fluctuations seen)


cdef class AutoregressiveUtility(UtilitySignal):
    cdef Py_ssize_t _top_k

    @cython.locals(cells=bytearray, first=Py_ssize_t, expert=Py_ssize_t)
    cpdef count(self, Py_ssize_t layer, experts, tokens)


cdef class RecencyUtility(UtilitySignal):
    @cython.locals(cells=bytearray, first=Py_ssize_t, top=int, expert=Py_ssize_t)
    cpdef count(self, Py_ssize_t layer, experts, tokens)
