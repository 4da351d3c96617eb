"""Tiers with capacities, contiguous weight units, disk extents and the copies between them."""
