"""The comparison with other engines: every system runs the same work in a process of its own, and is measured alike.

An adapter is a module run as `python -m h2o_flexgen.baselines.NAME FOLDER`. It reads its work from FOLDER
(`work.Work`), generates, and prints one line of JSON last (`work.Outcome`). It imports nothing else of this package, so
that a peer may live in an environment of its own; `own` is the exception, being this package.
"""
