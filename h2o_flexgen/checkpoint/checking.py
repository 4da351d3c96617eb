"""What can be refused of a checkpoint before torch is imported, which takes seconds: all that its tables show."""

from __future__ import annotations

import os
import re

from h2o_flexgen.checkpoint.binding import Binding, FoundTensor
from h2o_flexgen.checkpoint.files import CheckpointFile, Problems
from h2o_flexgen.checkpoint.hub import ResolvedModel
from h2o_flexgen.checkpoint.shards import Shards, find_shards
from h2o_flexgen.checkpoint.tables import bin_table, safetensors_table
from h2o_flexgen.models.families import by_modules, check_config, checkpoint_names, ignored_names
from h2o_flexgen.models.quantized import read_quantization


def check_model(found: ResolvedModel, impl: str, weights: bool) -> None:
    """ModelError for what cannot be used of `found`: its shape, and of its `weights` what the tables of GGUF and
    safetensors files say. Where transformers' modules compute, and for pickled files, loading sees the rest."""
    check_config(found.config, found.name, found.impl(impl))
    if found.gguf is not None:
        if found.impl(impl) == "native":
            found.spec()
        return
    if not weights or found.folder is None:
        return
    root, problems = str(found.folder), Problems()
    shards = find_shards(root, problems)
    if shards is None or not shards.present:
        problems.raise_any(root)
    elif shards.kind == "safetensors" and not by_modules(found.config, found.name, impl):
        spec = found.spec("native")
        patterns = tuple(map(re.compile, ignored_names(spec)))
        quantization = read_quantization(found.config, found.name)
        files: list[CheckpointFile] = []
        try:
            bind_files(root, shards, Binding(spec, checkpoint_names(spec), patterns, problems, quantization), files)
            problems.raise_any(root)
        finally:
            for file in files:
                file.close()


def bind_files(root: str, shards: Shards, binding: Binding, files: list[CheckpointFile]) -> dict[str, FoundTensor]:
    """Where the model's tensors are, by canonical name, as the tables of all shards in the folder `root` say; opened
    files are appended to `files`, and what is wrong goes into the problems of `binding`."""
    tables, problems = {}, binding.problems
    for name in shards.files:
        if name not in shards.present:
            continue
        try:
            file = CheckpointFile(os.path.join(root, name))
        except OSError as error:
            problems.add(f"{name} cannot be opened: {error.strerror}", download=True)
            continue
        files.append(file)
        if shards.kind == "safetensors":
            table = safetensors_table(file, problems)
        else:
            table = bin_table(file, problems, binding.least_bytes(shards, name))
        if table is not None:
            tables[name] = table
    return binding.bind(shards, tables)
