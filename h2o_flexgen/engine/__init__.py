"""Walks the schedule: executor, buffers, sampler, trace and the LLM facade."""
