"""Kernels in C for x86-64 CPUs, compiled on first use: written for AVX-512 with bfloat16, run on AVX2 as well.

Every one of them has a twin in torch, which serves where there is no compiler, no such processor or another dtype.
"""
