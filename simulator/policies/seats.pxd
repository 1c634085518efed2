cimport cython


@cython.final
cdef class Seat:
    cdef readonly Py_ssize_t layer
    cdef readonly Py_ssize_t expert
    cdef public Py_ssize_t place
    cdef public Py_ssize_t queue
    cdef public Py_ssize_t uses


@cython.locals(seat=Seat)
cdef Seat make_seat(Py_ssize_t layer, Py_ssize_t expert)


@cython.final
cdef class SeatTable:
    cdef list _seats
    cdef list _rows

    @cython.locals(layer=Py_ssize_t, seats=list, expert=Py_ssize_t)
    cpdef list of_row(self, list row)
    @cython.locals(layer=Py_ssize_t, expert=Py_ssize_t, seats=list)
    cpdef Seat find(self, tuple key)
    @cython.locals(row=list)
    cpdef tuple key_of(self, Seat seat)


@cython.final
cdef class SeatQueue:
    cdef readonly Py_ssize_t number
    cdef readonly list entries
    cdef readonly Py_ssize_t head
    cdef readonly Py_ssize_t held

    cpdef append(self, Seat seat)
    cpdef drop(self, Seat seat)
    cpdef requeue(self, Seat seat)
    @cython.locals(seat=Seat)
    cpdef bint counts(self, Py_ssize_t place)
    cpdef Py_ssize_t first(self)
    @cython.locals(kept=list, seat=Seat, place=Py_ssize_t)
    cpdef tidy(self)
