"""Reading checkpoints, making dummy ones, packing them for the disk tier."""
