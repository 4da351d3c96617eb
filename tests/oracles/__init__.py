"""Slow, obvious versions of what the package does fast. Plain Python: loops, lists, dicts, sets."""
