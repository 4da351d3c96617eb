"""Tests and measurements that need a GPU, run by `scripts/gpu_check.sh`: `check` walks the sections, a module each."""
