"""What runs and measurements report, as JSON. No torch."""
