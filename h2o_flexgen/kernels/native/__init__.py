"""Kernels in C for CPUs with AVX-512 and its bfloat16 dot product, compiled on first use by the compiler found there.

Every one of them has a twin in torch, which serves where there is no compiler, no such processor or another dtype.
"""
