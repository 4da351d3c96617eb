"""GGUF files, those of llama.cpp: weights, config and tokenizer in one."""
