"""The comparison with other engines: every system runs the same work in a process of its own, and is measured alike.

An adapter is a module run as `python -m h2o_flexgen.baselines.NAME FOLDER`. It reads its work from FOLDER
(`work.AdapterWork`), generates, and prints one line of JSON last (`work.Outcome`); work that it cannot do it refuses
with `work.CannotRun`. It imports no other part of this package but neighbours that import no other part either
(`work`, `transformers`, `flexgen_placement`, `random_gguf`), so that a peer may live in its own environment; `own` is
the exception, being this package. A new peer is an adapter, a row of `settings.SYSTEMS` and its versions in
`configs/peers/`.
"""
