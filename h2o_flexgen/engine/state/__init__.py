"""The contents of the tiers while the engine runs: weights, KV caches, hidden states, and how they are loaded."""
