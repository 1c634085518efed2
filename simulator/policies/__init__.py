"""The decisions, written once: what to load, evict, prefetch and wait for. No clock, files, tensors or threads.

The SimPy machine and the live engine drive the same `OffloadCore` with the same calls in the same order.
"""
