"""The planner as a library, and the public engine that uses it: what `LLM`, `run` and `bench` share."""
