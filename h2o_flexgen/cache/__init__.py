"""KV caches at a fixed budget and the policies that keep them there."""
