cimport cython


@cython.final
cdef class Asked:
    cdef readonly Py_ssize_t layer
    cdef readonly object experts
    cdef readonly object tokens
    cdef readonly bytearray places


@cython.locals(asked=Asked)
cpdef Asked make_asked(Py_ssize_t layer, experts, tokens, bytearray places)


cdef class PlacementPolicy:
    cpdef begin_pass(self, bint is_prefill)
    cpdef cpu_part(self, Asked asked)


cdef class MissesOnCpu(PlacementPolicy):
    cdef public Py_ssize_t max_admissions

    @cython.locals(places=bytearray, landed=int, part=list, expert=Py_ssize_t)
    cpdef cpu_part(self, Asked asked)


cdef class FewTokensOnCpu(PlacementPolicy):
    cdef public Py_ssize_t max_admissions
    cdef long long _max_tokens

    @cython.locals(places=bytearray, most="long long", landed=int, part=list, index=Py_ssize_t, expert=Py_ssize_t)
    cpdef cpu_part(self, Asked asked)


cdef class WholeLayers(PlacementPolicy):
    cdef readonly object cpu_layers
    cdef readonly bint needs_token_counts
    cdef public Py_ssize_t max_admissions
    cdef PlacementPolicy _others
