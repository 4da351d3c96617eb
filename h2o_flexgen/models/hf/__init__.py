"""Decoders that are computed by transformers' own modules: any that has no family here, or all if that is wanted.

Their weights, attention, caches, schedule and sampling are the engine's. This folder imports transformers, and is not
imported before such a model is asked for.
"""
