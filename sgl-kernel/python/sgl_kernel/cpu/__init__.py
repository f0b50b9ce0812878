"""Kernels in C for float32 on the CPU: linear layers over packed weights, attention over pages, element-wise work.

Compiled at first use, see `NativeLibrary`. They run on threads of their own, as many as torch uses. A row's bits
depend on neither the other rows, nor the number of threads. Callers ask `takes` first; without a compiler, or for
other types, torch does the work.
"""
