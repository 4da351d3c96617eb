"""What needs a GPU, tested and measured by `scripts/gpu_check.sh`: `check` walks the sections, a module each."""
