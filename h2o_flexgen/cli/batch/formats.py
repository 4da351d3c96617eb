"""How a job's requests are read and its results are written: by its file and its flags."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from h2o_flexgen.cli.batch.arguments import BatchArguments
from h2o_flexgen.engine.model import Model
from h2o_flexgen.jobs.openai import OpenAIFormat
from h2o_flexgen.jobs.plain import PlainFormat
from h2o_flexgen.jobs.requests import RequestFormat


def request_format(
    arguments: BatchArguments, model: Model, kind: str, doubled: frozenset[int], header: Mapping[str, Any]
) -> RequestFormat:
    """The format of a source of this `kind`. `doubled`: lines whose custom_id stood before; `header`: the journal's."""
    seed = arguments.engine.seed
    if kind != "openai":
        return PlainFormat(
            kind,
            arguments.engine.model,
            model.codec,
            seed,
            arguments.sampling,
            arguments.prompt_column,
            arguments.id_column,
            arguments.chat,
            model.dummy,
        )
    eos = model.spec.eos_token_ids
    return OpenAIFormat(
        arguments.engine.model,
        model.codec,
        (eos,) if isinstance(eos, int) else tuple(eos),
        seed,
        arguments.typed,
        header.get("created", 0),
        hashlib.sha256(json.dumps(header.get("job")).encode()).hexdigest(),
        model.dummy,
        doubled,
    )
