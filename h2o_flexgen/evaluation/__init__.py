"""How good a model still is with its KV cache held at a budget: recall, perplexity, texts side by side."""
