"""From logits to tokens: the sampler, logits processors, and transformers' `generate` on top of the engine."""
