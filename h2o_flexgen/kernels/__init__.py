"""Attention, score accumulation and slot replacement: one signature, several implementations."""
