"""The order of work as data: ticks, their checks, footprint and timeline. No torch."""
