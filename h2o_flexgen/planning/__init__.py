"""The planner as a library, and the public engine that uses it: `LLM`, `run` and `bench` share both."""
