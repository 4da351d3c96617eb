"""How fast a machine is. No torch."""
