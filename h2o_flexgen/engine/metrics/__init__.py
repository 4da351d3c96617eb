"""What a run measures: the record, the trace of who was busy when, and the counted work."""
