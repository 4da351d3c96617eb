"""Attention, score accumulation, products and norms: one signature each, several implementations."""
