"""Reports of runs and measurements, as JSON. No torch."""
