"""GPU batches: which sequences a step computes, and how their prompts are packed."""
