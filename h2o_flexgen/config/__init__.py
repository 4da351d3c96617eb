"""The settings of a run, as frozen, validated dataclasses. No torch."""
