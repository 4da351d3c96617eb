"""The measurements of a run: the record, the trace of who was busy when, and the counted work."""
