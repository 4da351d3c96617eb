"""What a model is made of, and how large: read from its config.json. No torch."""
