"""Walks the ticks of a schedule: blocks, the executor, attention, transfers between GPUs, CUDA graphs."""
