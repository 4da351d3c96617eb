"""Benchmarks of the project: a module for each table or curve, run as `python -m benchmarks.NAME` from the sources."""
