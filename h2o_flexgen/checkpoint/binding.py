"""Matches what weight files hold with what a model needs: which rows of which stored tensors, and their bytes."""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

import numpy as np

from h2o_flexgen.checkpoint.files import CheckpointFile, Fault, Problems, refuse_foreign
from h2o_flexgen.checkpoint.matrices import Array, StoredMatrix, StoredPart
from h2o_flexgen.checkpoint.quantized import PACKED_DTYPES, PART_NAMES, stored_matrix
from h2o_flexgen.checkpoint.shards import Shards, listed
from h2o_flexgen.checkpoint.tables import FileTensor, bin_table, safetensors_table
from h2o_flexgen.checkpoint.wanted import LAYER, Range, Wanted
from h2o_flexgen.config.model.packing import Packing
from h2o_flexgen.config.model.spec import ModelSpec
from h2o_flexgen.config.model.tensors import WEIGHT_DTYPES
from h2o_flexgen.errors import required
from h2o_flexgen.models.quantized import SETTINGS_FILES
from h2o_flexgen.models.schemes import Quantization, Scheme
from h2o_flexgen.models.stored import Stored

log = logging.getLogger(__name__)

_MXFP4 = ("blocks", "scales")
_SMALL = 1 << 20  # bytes
_TIED_HEADS = ("lm_head.weight", "language_model.lm_head.weight", "embed_out.weight")
_EMBEDDING = "embed.tokens"
_OF_ACTIVATIONS = ("activation_scale", "input_scale", "input_zero_point", "input_global_scale")
"""Scales of activations, in their module, which are not used."""
_OF_CACHES = r"\.[kv]_scale$"
"""Scales of keys and values."""

_QUANTISED = re.compile(
    r"\.(qweight|qzeros|scales|g_idx|weight_packed|weight_shape|weight_g_idx|weight_zero_point|weight_scale(_inv|_2)?"
    r"|(weight|input)_global_scale|(input|output|k|v)_scale|(nested_)?(absmax|quant_map)|quant_state\.\w+|SCB"
    r"|weight_format)$"
)
"""Tensors that GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes store beside or instead of weights."""

Tables = Mapping[str, Mapping[str, FileTensor]]
"""Shard name -> tensor name -> where it is."""


class PackedTensor(NamedTuple):
    """A canonical matrix of fewer bits: the outputs `rows` of `stored`, whose tensors are `parts`."""

    stored: StoredMatrix
    parts: Mapping[str, FileTensor]
    rows: tuple[Range, ...]
    packing: Packing
    shape: tuple[int, ...]


FoundTensor = FileTensor | PackedTensor


def tensor_in(entry: FileTensor, stored: Stored, shape: tuple[int, ...]) -> FileTensor:
    """The tensor of `shape` that is the rows of `entry` that `stored` names; the shape of `entry` has been checked."""
    if stored.spans is None:
        return entry._replace(shape=shape)
    row = entry.nbytes // stored.rows
    runs = ((entry.offset + start * row, entry.offset + stop * row) for start, stop in merged(stored.spans))
    return entry._replace(runs=tuple(runs), shape=shape, transposed=stored.transposed)


def merged(spans: Iterable[Range]) -> list[Range]:
    """The same rows in the same order, with spans that follow one another as one, and without empty ones."""
    found: list[Range] = []
    for start, stop in spans:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        elif start < stop:
            found.append((start, stop))
    return found


class Binding:
    """The tensors that the model of `spec` needs, to be compared with the tables of its files; notes every difference.

    `quantization`: the description of packed matrices in config.json; None: there are none.
    `tied_copy`: the output head that a tied model's checkpoint holds besides its token embedding, once bound.
    """

    def __init__(
        self,
        spec: ModelSpec,
        names: Mapping[str, Sequence[str | Stored]],
        ignored: Iterable[str | re.Pattern[str]],
        problems: Problems,
        quantization: Quantization | None = None,
    ) -> None:
        self._wanted = Wanted(spec, names)
        self._quantization = quantization
        unread = (_OF_CACHES,) if quantization is not None and quantization.cached else ()
        self._ignored = [re.compile(pattern) for pattern in (*ignored, *unread)]
        self._tied_heads = _TIED_HEADS if spec.arch.tied_head else ()
        self._vocab_shape = (spec.vocab_size, spec.embed_dim)
        self._layers, self._predicting = self._wanted.layers, spec.arch.predicting
        self.problems = problems
        self.tied_copy: tuple[str, FileTensor] | None = None
        self._tables: Tables = {}
        self._where: dict[str, list[str]] = {}  # stored name -> the shards that have it
        self._found: dict[str, str] = {}  # canonical name -> stored name
        self._tensors: dict[str, FoundTensor] = {}

    def least_bytes(self, shards: Shards, shard: str) -> int:
        """Bytes in 16 bits of the weights that `shard` should hold; 0 where they have fewer."""
        if self._quantization is not None:
            return 0
        index = shards.index
        held = {
            frozenset(options): math.prod(self._wanted.shapes[name])  # tensors that are the same one are there once
            for name, options in self._wanted.options.items()
            if index is None or any(index.get(option.name) == shard for option in options)
        }
        return 2 * sum(held.values())

    def bind(self, shards: Shards, tables: Tables) -> dict[str, FoundTensor]:
        """Canonical name -> where its bytes are, for all tensors that are fine. To be called once."""
        self._tables, tensors = tables, self._tensors
        for shard, table in tables.items():
            for stored in table:
                self._where.setdefault(stored, []).append(shard)
        self._check_index(shards)
        lost = {stored for stored, shard in (shards.index or {}).items() if shard not in tables}
        surplus = self._surplus_layers()
        packed = self._claim_packed(lost)
        quantised = {stored: None for stored in self._where if stored not in surplus and self._is_quantised(stored)}
        self._note_quantised(list(quantised))
        for stored, holders in self._where.items():
            if self._is_ignored(stored) or stored in quantised or stored in packed or stored in surplus:
                continue
            if len(holders) > 1:
                self.problems.add(f"tensor {stored!r} is in {' and in '.join(holders)}")
            entry = self._entry(stored)
            if stored in self._wanted.users:
                fine = self._check_tensor(stored, self._wanted.shape(stored), entry)
                self._give(stored, partial(tensor_in, entry) if fine else None)
            elif stored in self._tied_heads:
                if self._check_tensor(stored, self._vocab_shape, entry):
                    self.tied_copy = (stored, entry)
            elif math.prod(entry.shape):  # transformers writes shared experts of no numbers where there are none
                tied = f"{stored.rpartition('.')[0]}.weight" in self._tied_heads
                change = ", unless config.json has tie_word_embeddings false: a head of its own" if tied else ""
                self.problems.add(f"tensor {stored!r} of {holders[0]} is not part of this model{change}")
        self._settle_tied()
        if quantised:
            return tensors  # what is missing is there in another form, which has been reported
        if len(tables) == len(shards.files):
            self._check_missing()
        elif shards.index is not None:
            self._check_missing(lost)
        return tensors

    def _surplus_layers(self) -> set[str]:
        """The tensors of layers behind config.json's last, which are not read; a warning where it names none such."""
        layers: dict[int, list[str]] = {}
        for stored in self._where:
            found = LAYER.match(stored)
            if found and found[1] in self._wanted.stems and int(found[2]) >= self._layers:
                layers.setdefault(int(found[2]), []).append(stored)
        known = [layer for layer in sorted(layers) if layer < self._layers + self._predicting]
        if known:
            log.info("%s", _of_layers(known, " of the checkpoint", "not read: more tokens are predicted there"))
        if rest := sorted(layers.keys() - set(known)):
            why = f"not read: config.json has num_hidden_layers {self._layers}"
            log.warning("%s", _of_layers(rest, " of the checkpoint", why))
        return {stored for names in layers.values() for stored in names}

    def _entry(self, stored: str) -> FileTensor:
        return self._tables[self._where[stored][0]][stored]

    def _claim_packed(self, lost: set[str]) -> set[str]:
        """Give quantised matrices to the canonical tensors that they hold; returns the names of the tensors that they
        are stored as. `lost`: names of tensors in files already reported."""
        packed, where = set[str](), self._where
        if self._quantization is None:
            return packed
        for stored, users in self._wanted.users.items():
            if all(f"{stored}_{part}" in where for part in _MXFP4):
                packed.update(f"{stored}_{part}" for part in _MXFP4)
                self._claim_mxfp4(stored, self._quantization.scheme(stored, "Linear"))
                continue
            module = stored.removesuffix(".weight")
            held = {part: f"{module}.{part}" for part in PART_NAMES if f"{module}.{part}" in where}
            entries = {part: self._entry(name) for part, name in held.items()}
            turned = all(option.transposed for option in users.values())  # which no quantiser keeps
            shape = self._wanted.shape(stored)[:: -1 if turned else 1]
            # Else it is a plain weight.
            is_packed = held.keys() - {"weight"} or any(each.dtype in PACKED_DTYPES for each in entries.values())
            if module == stored or len(shape) != 2 or not is_packed:
                continue
            packed.update(held.values())
            if self._quantization.static:
                packed.update(name for name in (f"{module}.{part}" for part in _OF_ACTIVATIONS) if name in where)
            bias = f"{module}.bias"  # some programs give every module one
            if bias in where and not self._is_known(bias) and _is_zero(self._entry(bias)):
                packed.add(bias)
            for name in held.values():
                if len(where[name]) > 1:
                    self.problems.add(f"tensor {name!r} is in {' and in '.join(where[name])}")
            scheme = self._quantization.scheme(module, "Embedding" if _EMBEDDING in users else "Linear")
            if scheme is None:
                self.problems.add(
                    f"tensor {next(iter(held.values()))!r} is of quantised weights, "
                    f"but quantization_config in config.json leaves {module} out"
                )
                self._give(stored, None)
            else:
                if scheme.layout == "bnb4" and "weight" in entries:
                    entries["weight"] = entries["weight"].as_bytes()  # a float may stand for several codes
                shapes = {part: entry.shape for part, entry in entries.items()}
                matrix = stored_matrix(scheme, (shape[0], shape[1]), shapes)
                excused = {part for part in PART_NAMES if f"{module}.{part}" in lost}
                bound = MatrixParts(module, matrix, entries).bound(excused, self.problems)
                self._give(stored, partial(_rows_of, bound, shape[1], shape[0]) if turned and bound else bound)
        return packed

    def _claim_mxfp4(self, stored: str, scheme: Scheme | None) -> None:
        """As `_claim_packed`, of all experts of a layer, which plain checkpoints keep the other way round."""
        option = next(iter(self._wanted.users[stored].values()))
        count, ins, outs = option.shape
        entries = {part: self._entry(f"{stored}_{part}") for part in _MXFP4}
        shapes = {"blocks": (count, outs, ins // 32, 16), "scales": (count, outs, ins // 32)}
        for part, entry in entries.items():
            if entry.shape != shapes[part] or scheme is None or scheme.layout != "mxfp4":
                self.problems.add(f"tensor '{stored}_{part}': expected {shapes[part]} of MXFP4, found {entry.shape}")
                self._give(stored, None)
                return
            entries[part] = entry._replace(shape=(count * outs, math.prod(entry.shape) // (count * outs)))
        matrix = stored_matrix(required(scheme, "no scheme"), (count * outs, ins), {})
        bound = MatrixParts(stored, matrix, entries).bound((), self.problems)
        self._give(stored, None if bound is None else partial(_rows_of, bound, ins, outs))

    def _give(self, stored: str, part_of: Callable[[Stored, tuple[int, ...]], FoundTensor] | None) -> None:
        """Give `part_of` tensor `stored` to each canonical tensor that is a part of it; None: it is faulty."""
        unused = ", ".join(f"{start} to {stop - 1}" for start, stop in self._wanted.unused(stored))
        if part_of is not None and unused:
            self.problems.add(f"tensor {stored!r}: rows {unused} are not part of this model")
        doubled: dict[str, list[str]] = {}
        for name, option in self._wanted.users[stored].items():
            if name in self._found:
                doubled.setdefault(self._found[name], []).append(name)
                continue
            self._found[name] = stored
            if part_of is not None:
                self._tensors[name] = part_of(option, self._wanted.shapes[name])
        for other, names in doubled.items():
            self.problems.add(f"tensors {other!r} and {stored!r} are both {', '.join(names)}")

    def _settle_tied(self) -> None:
        """Binds a tied pair, of which a checkpoint may have either one or both."""
        if self.tied_copy is None:
            return
        stored, tensor = self.tied_copy
        if _EMBEDDING not in self._found:
            self._found[_EMBEDDING], self._tensors[_EMBEDDING] = stored, tensor
            self.tied_copy = None
            log.info("the token embedding is read from %s, to which it is tied", stored)
        else:
            log.info("%s is not read: the model's head is its token embedding", stored)

    def _is_known(self, stored: str) -> bool:
        return stored in self._wanted.users or stored in self._tied_heads

    def _is_ignored(self, stored: str) -> bool:
        return not self._is_known(stored) and any(pattern.search(stored) for pattern in self._ignored)

    def _is_quantised(self, stored: str) -> bool:
        """Whether it is of quantised weights of which config.json does not say what they are."""
        if self._quantization is not None:
            return False
        return not self._is_known(stored) and not self._is_ignored(stored) and bool(_QUANTISED.search(stored))

    def _note_quantised(self, stored: Sequence[str]) -> None:
        if stored:
            more = f" and {len(stored) - 1} more are" if len(stored) > 1 else " is"
            self.problems.add(
                f"tensor {stored[0]!r}{more} of quantised weights, which are not read: nothing says how they are "
                f"stored. Put the quantiser's settings into quantization_config in config.json, or its "
                f"{SETTINGS_FILES[0]} beside it; or use the model's checkpoint in {', '.join(WEIGHT_DTYPES)}"
            )

    def _check_index(self, shards: Shards) -> None:
        if shards.index is None:
            return
        for stored, shard in shards.index.items():
            unread = self._is_ignored(stored) or stored in self._tied_heads
            if shard in self._tables and stored not in self._tables[shard] and not unread:
                self.problems.add(f"tensor {stored!r} is not in {shard}, where the index has it", download=True)
        for stored, holders in self._where.items():
            if stored not in shards.index and not self._is_ignored(stored):
                self.problems.add(f"tensor {stored!r} of {holders[0]} is not in the index", download=True)

    def _check_tensor(self, stored: str, shape: tuple[int, ...], entry: FileTensor) -> bool:
        """Whether the tensor has `shape` and a dtype that can be read; a problem for each that is not so."""
        if entry.shape != shape:
            self.problems.add(f"tensor {stored!r}: expected shape {shape} from config.json, found {entry.shape}")
        if entry.dtype not in WEIGHT_DTYPES:
            self.problems.add(f"tensor {stored!r}: expected dtype {', '.join(WEIGHT_DTYPES)}, found {entry.dtype}")
        return entry.shape == shape and entry.dtype in WEIGHT_DTYPES

    def _check_missing(self, excused: Iterable[str] = ()) -> None:
        """Note what is missing, but for tensors that a file already reported would hold."""
        missing: dict[str, list[str]] = {}
        modules = {name.rpartition(".")[0] for name in excused} if self._quantization else set()
        excused = {*excused, *(f"{module}.weight" for module in modules)}
        for name, options in self._wanted.options.items():
            if name not in self._found and not excused.intersection(option.name for option in options):
                missing.setdefault(options[0].name, []).append(name)
        lost = set(chain(*missing.values()))
        numbered = [(name, int(found[2])) for name in self._wanted.options if (found := LAYER.match(name))]
        there = {layer for name, layer in numbered if name not in lost}
        layers = [layer for layer in dict.fromkeys(layer for _, layer in numbered) if layer not in there]
        if layers:
            why = f"missing: config.json has num_hidden_layers {self._layers}"
            self.problems.add(_of_layers(layers, "", why), download=True)
        for stored, names in missing.items():
            found = LAYER.match(stored)
            if found is None or int(found[2]) not in layers:
                self.problems.add(f"tensor {stored!r} ({listed(names)}) is missing", download=True)


def bind_files(
    root: str, shards: Shards, binding: Binding, opened: ExitStack
) -> tuple[dict[str, FoundTensor], list[CheckpointFile]]:
    """Where the model's tensors are, by canonical name, as the tables of all shards in the folder `root` say, and the
    files, which are left to `opened`. All that is wrong goes into the problems of `binding`."""
    tables, files, problems = {}, list[CheckpointFile](), binding.problems
    for name in shards.files:
        if name not in shards.present:
            continue
        try:
            file = opened.enter_context(CheckpointFile(os.path.join(root, name)))
        except OSError as error:
            problems.add(f"{name} cannot be opened: {error.strerror}", download=True)
            continue
        files.append(file)
        try:
            refuse_foreign(file)
            if shards.kind == "safetensors":
                tables[name] = safetensors_table(file, problems)
            else:
                tables[name] = bin_table(file, problems, binding.least_bytes(shards, name))
        except Fault as fault:
            problems.add(fault.of(name), download=fault.download)
    return binding.bind(shards, tables), files


def _rows_of(
    bound: Callable[[Stored, tuple[int, ...]], FoundTensor], ins: int, outs: int, option: Stored, shape: tuple[int, ...]
) -> FoundTensor:
    """The `outs` rows of a matrix, or of one of several, of which `option` says where it is where inputs are rows."""
    number = (option.spans or ((0, 0),))[0][0] // ins
    return bound(replace(option, spans=((number * outs, (number + 1) * outs),)), shape)


class MatrixParts(NamedTuple):
    """The tensors `entries` (by their names in `module`) that a checkpoint has of the quantised `matrix`."""

    module: str
    matrix: StoredMatrix
    entries: Mapping[str, FileTensor]

    def bound(
        self, excused: Collection[str], problems: Problems
    ) -> Callable[[Stored, tuple[int, ...]], PackedTensor] | None:
        """The conversion that makes a canonical tensor of its rows; None, and why in `problems`, where the tensors are
        not what they must be. `excused`: parts that may be missing."""
        before = len(problems.texts)
        expected = self.matrix.parts()
        misfit = self.matrix.misfit()
        if misfit:
            problems.add(f"{self.module} cannot be quantised as config.json says: {misfit}")
            return None
        for part, entry in self.entries.items():
            if part in expected:
                self._check(part, expected[part], entry, problems)
            elif part != "weight_zero_point" or not _is_zero(entry):  # symmetric weights may have some that are all 0
                problems.add(f"tensor '{self.module}.{part}' has no place in weights quantised as config.json says")
        for part, each in expected.items():
            if each.needed and part not in self.entries and part not in excused:
                problems.add(f"tensor '{self.module}.{part}' is missing", download=True)
        if len(problems.texts) > before or any(expected[part].needed for part in expected if part not in self.entries):
            return None
        packing = self._packing(problems)
        return None if packing is None else partial(self._rows, packing)

    def _check(self, part: str, expected: StoredPart, entry: FileTensor, problems: Problems) -> None:
        for what, fine, found in (
            ("shape", expected.shapes, entry.shape),
            ("dtype", expected.dtypes, entry.dtype),
        ):
            if found not in fine:
                wanted = " or ".join(str(each) for each in fine)
                problems.add(f"tensor '{self.module}.{part}': expected {what} {wanted}, found {found}")

    def _packing(self, problems: Problems) -> Packing | None:
        """Its layout here, which the groups of its inputs decide too. None, and why, where contents are wrong."""
        scale = next((entry.dtype for part, entry in self.entries.items() if "scale" in part), "float32")
        ordered, before = False, len(problems.texts)
        if "weight_shape" in self.entries:
            said = self._content("weight_shape")
            if said is not None and tuple(said) != self.matrix.shape:
                text = f"expected {self.matrix.shape} from config.json, found {tuple(said.tolist())}"
                problems.add(f"tensor '{self.module}.weight_shape': {text}")
        if fault := self.matrix.fault(self._content):
            problems.add(f"tensor '{self.module}.{fault}")
        if self.matrix.g_idx in self.entries:
            groups = self._content(self.matrix.g_idx)
            try:
                ordered = groups is not None and self.matrix.order(groups) is not None
            except ValueError as error:
                problems.add(f"tensor '{self.module}.{self.matrix.g_idx}': {error}")
        return self.matrix.packing(scale, ordered) if len(problems.texts) == before else None

    def _content(self, part: str) -> Array | None:
        """The numbers of a part; None where there is none, or the file is shorter, which has been reported."""
        entry = self.entries.get(part)
        if entry is None:
            return None
        data = entry.file.head(entry.nbytes, entry.offset)
        return np.frombuffer(data, np.dtype(entry.dtype)) if len(data) == entry.nbytes else None

    def _rows(self, packing: Packing, option: Stored, shape: tuple[int, ...]) -> PackedTensor:
        rows = tuple(merged(option.spans or [(0, self.matrix.shape[0])]))
        return PackedTensor(self.matrix, self.entries, rows, packing, shape)


def _of_layers(numbers: Sequence[int], where: str, what: str) -> str:
    """ "layer 2 is ...", "layers 2, 3 and 4 of the checkpoint are ...", "layers 2 to 40 are ..."."""
    if len(numbers) == 1:
        return f"layer {numbers[0]}{where} is {what}"
    shown = [str(number) for number in numbers]
    if len(shown) > 8:
        shown = [*shown[:7], f"{len(shown) - 7} more"]
    listed = f"{', '.join(shown[:-1])} and {shown[-1]}"
    if len(numbers) > 3 and numbers[-1] - numbers[0] == len(numbers) - 1:
        listed = f"{numbers[0]} to {numbers[-1]}"
    return f"layers {listed}{where} are {what}"


def _is_zero(entry: FileTensor) -> bool:
    data = entry.file.head(entry.nbytes, entry.offset) if entry.nbytes <= _SMALL else b""
    return len(data) == entry.nbytes and not any(data)
