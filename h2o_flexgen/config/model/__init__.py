"""The parts of a model and their sizes: read from its config.json. No torch."""
