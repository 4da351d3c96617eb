"""Models of transformers without weights, whose products are ours, and what a run without data keeps alive."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import transformers
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import arg_tree_leaves, tree_leaves
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)
from transformers.pytorch_utils import Conv1D

from h2o_flexgen.config.model.modules import Activations
from h2o_flexgen.errors import ModelError, first_line
from h2o_flexgen.kernels.layers import linear
from h2o_flexgen.kernels.packed import PackedWeight, look_up
from h2o_flexgen.models.hf.attention import NAME
from h2o_flexgen.models.hf.changes import adapt, register
from h2o_flexgen.models.hf.experts import TEXT_ONLY

T = TypeVar("T", bound=NamedTuple)

OTHER_CODE = ("auto_map", "custom_pipelines", "quantization_config", "torch_dtype", "dtype")
"""Keys of a config.json that the modules are made without."""


def model_types() -> frozenset[str]:
    """The model types of which this transformers has a decoder, alone or with others that look at images."""
    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | frozenset(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def build(
    config: str, name: str, dtype: torch.dtype = torch.float32, *, alone: bool = False
) -> transformers.PreTrainedModel:
    """The modules of a config.json (its text), on a CPU: parameters on meta, buffers in memory.

    `alone`: for sequences that go through them one by one, by transformers' own attention.

    ModelError in transformers' words where it cannot make them.
    """
    raw = json.loads(config)
    kept = {key: value for key, value in raw.items() if key not in OTHER_CODE}
    try:
        with quiet(), _parameters_on_meta():
            made = CONFIG_MAPPING[raw["model_type"]].from_dict(plain(kept))
            kind: Any = transformers.AutoModelForCausalLM
            if raw["model_type"] in TEXT_ONLY:
                made = made.get_text_config(decoder=True)
            elif raw["model_type"] in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:  # names of tensors are then its own
                kind = transformers.AutoModelForImageTextToText
            attention = "eager" if alone else NAME
            register(raw["model_type"])
            model = kind.from_config(made, dtype=dtype, attn_implementation=attention, experts_implementation=NAME)
            model.tie_weights()
            adapt(model, alone)
            for module in model.modules():
                if hasattr(module, "warn_if_padding_and_no_attention_mask"):  # it would look at the tokens
                    module.warn_if_padding_and_no_attention_mask = lambda *_, **__: None
    except Exception as error:  # whatever it raises is about this config
        raise ModelError(
            f"{name}: transformers {transformers.__version__} cannot make a {raw['model_type']!r}: "
            f"{type(error).__name__}: {first_line(error)}",
            "needed a config.json of a decoder that it can",
        ) from error
    return model.eval()


def plain(value: Any) -> Any:
    """Of a config.json: infinities, which transformers writes as objects, as numbers."""
    if isinstance(value, dict):
        return float(value["__float__"]) if set(value) == {"__float__"} else {k: plain(v) for k, v in value.items()}
    return [plain(each) for each in value] if isinstance(value, list) else value


@contextmanager
def quiet() -> Iterator[None]:
    """transformers says nothing within but errors."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
        transformers.logging.set_verbosity(level)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        register(module, name, param)
        if param is not None and not param.is_meta:  # one that is stays itself: others may be tied to it
            made = nn.Parameter(param.to("meta"), requires_grad=False)
            made._is_hf_initialized = True  # type: ignore[attr-defined]  # transformers draws no numbers for it
            module._parameters[name] = made

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class Absent:
    """Stands for a tensor while its unit is not computed: any use of it fails, but a model may ask for its device."""

    def __init__(self, name: str, device: torch.device) -> None:
        self.name, self.device = name, device


class Packed:
    """A packed matrix where modules look for a tensor: products with it, and rows of it, are ours."""

    def __init__(self, weight: PackedWeight) -> None:
        self.packed, self.dtype, self.device, self.shape = weight, weight.dtype, weight.device, weight.shape

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.embedding:
            return look_up(args[1].packed, args[0].flatten()).unflatten(0, args[0].shape)
        if function is torch.nn.functional.linear:
            return multiply(args[1], args[0], *args[2:], **(kwargs or {}))
        # A module that takes it for something else: as Jamba's steps, which are small.
        return function(*(x.packed.expanded() if isinstance(x, Packed) else x for x in args), **(kwargs or {}))

    def is_floating_point(self) -> bool:
        """Of what it stands for: a model's dtype is that of the first of its parameters that is."""
        return True


class Matrix(Tensor):
    """A matrix on the CPU whose products are ours, as a router's: torch's may be slow at bfloat16 numbers."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if function is torch.nn.functional.linear and len(args) > 1 and args[0].dtype is args[1].dtype:
                return multiply(args[1], args[0], *args[2:], **(kwargs or {}))
            return function(*args, **(kwargs or {}))


def multiply(weight: Tensor | Packed, x: Tensor, bias: Tensor | None = None, wide: bool = False) -> Tensor:
    """x (..., in) times weight (out, in) transposed, plus bias: by our kernels."""
    matrix = weight.packed if isinstance(weight, Packed) else weight
    if isinstance(matrix, Absent):
        raise RuntimeError(f"{matrix.name} is used outside of its unit")
    if x.dim() == 2:
        return linear(x, matrix, bias, wide=wide)
    return linear(x.reshape(-1, x.shape[-1]), matrix, bias, wide=wide).view(*x.shape[:-1], -1)


def product(module: nn.Module, x: Tensor, wide: bool = False) -> Tensor:
    """x (..., in) times the matrix of a module for which `is_product` holds, plus its bias."""
    return multiply(module._parameters["weight"], x, module._parameters["bias"], wide)  # type: ignore[arg-type]


def is_product(module: nn.Module) -> bool:
    """Whether all that a module does is a product with its weight."""
    return type(module) in (nn.Linear, Conv1D) or type(module).__name__ == "FalconLinear"


def take_products(model: nn.Module, head: nn.Module | None) -> None:
    """From now on products are computed by our kernels, that of the output head in float32."""
    for module in model.modules():
        if is_product(module):
            module.forward = partial(product, module, wide=module is head)


class Amount(NamedTuple):
    """Numbers alive in tensors that operations have made, now, and the most since the last time they were counted: all,
    and without what was within recurrences."""

    now: int
    most: int
    outside: int


class Alive(TorchDispatchMode):
    """Counts them: a number that is wider than 16 bits in a model of 16 bits counts as two."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._foreign = set[int]()  # made elsewhere: weights, buffers
        self._listed = 0  # numbers of all that `_live` has, of which some may be gone
        self._most = self._outside = 0
        self._within = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in filter(torch.is_tensor, arg_tree_leaves(*args, **(kwargs or {}))):
            key = x.untyped_storage()._cdata
            if key not in self._live:
                self._foreign.add(key)
        result = func(*args, **(kwargs or {}))
        for x in filter(torch.is_tensor, tree_leaves(result)):
            storage = x.untyped_storage()
            if storage._cdata not in self._live and storage._cdata not in self._foreign:
                self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes() // 2
                self._listed += storage.nbytes() // 2
                if self._listed > (self._most if self._within else self._outside):  # else nothing new can be seen
                    self._see(self._count())
        return result

    def _see(self, numbers: int) -> None:
        self._most = max(self._most, numbers)
        if not self._within:
            self._outside = max(self._outside, numbers)

    def recurrence(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls a function of `mixers.OURS`, which a kernel may take the place of."""
        self._within = True
        try:
            return original(*args, **kwargs)
        finally:
            self._within = False
            self._see(self._count())

    def _count(self) -> int:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self._listed -= self._live.pop(key)[1]
        return self._listed

    def amount(self) -> Amount:
        self._see(now := self._count())
        found = Amount(now, self._most, self._outside)
        self._most = self._outside = now
        return found


def apart(call: T) -> T:
    """A call as it is kept: with empty tensors of the same sizes on meta, which are not counted."""
    with _disable_current_modes():
        tensors = {name: x for name, x in call._asdict().items() if isinstance(x, Tensor)}
        return call._replace(**{name: torch.empty_like(x, device="meta") for name, x in tensors.items()})


class Marked(list[Any]):
    """A list of what happens, with what was alive each time."""

    def __init__(self, alive: Alive) -> None:
        super().__init__()
        self.alive, self.amounts = alive, list[Amount]()
        self.mixing = dict[int, tuple[int, int]]()
        """By numbers of tokens, the most that mixers had alive, without recurrences and with them."""

    def append(self, event: Any) -> None:
        self.amounts.append(self.alive.amount())
        super().append(event)

    @contextmanager
    def inside(self, tokens: int, listed: bool = True) -> Iterator[None]:
        """Counts tensors alive within as a mixer's of so many tokens. Unless `listed`, events are not listed."""
        first, before = len(self), self.alive.amount().now
        yield
        amounts = [*self.amounts[first:], self.alive.amount()]
        each = (max(amount.outside for amount in amounts), max(amount.most for amount in amounts))
        seen = self.mixing.get(tokens, (0, 0))
        self.mixing[tokens] = (max(seen[0], each[0] - before), max(seen[1], each[1] - before))
        if not listed:
            del self[first:], self.amounts[first:]
        self.amounts[first:] = [Amount(before, before, before)] * (len(self) - first)

    def mixers(self, which: int) -> tuple[int, int]:
        """Numbers of each token, and beside these, that are alive in mixers: without recurrences, or with (1)."""
        few, many = min(self.mixing, default=0), max(self.mixing, default=1)
        less, more = (self.mixing.get(tokens, (0, 0))[which] for tokens in (few, many))
        growth = max(0, more - less) / max(1, many - few)
        return math.ceil(growth), max(0, math.ceil(less - few * growth))


def activations(events: Marked, starts: Sequence[int], tokens: int) -> Activations:
    """The Activations of events with a `kind` and a `path`, in a run of so many tokens of which one wanted logits;
    `starts`: the events, by number, that begin the units but the first."""
    amounts, begins = events.amounts, [0, *starts]
    last = max(i for i, event in enumerate(events) if event.kind == "enter")
    held = [amounts[i].now for i in (*begins, *(i for i, event in enumerate(events) if event.kind == "experts"))]
    working, attending = [0], [0]
    for first, end in pairwise([*begins, max(last, begins[-1] + 1)]):
        base = amounts[first].now
        working += [amount.most - base for amount in amounts[first + 1 : end + 1]]
        attending += [amounts[i].now - base for i in range(first, end) if events[i].kind == "attend"]
    head = max(amount.most for amount in amounts[last:]) - amounts[last].now
    each, busy, asked = (-(-max(numbers) // tokens) for numbers in (held, working, attending))
    return Activations(each, busy, asked, head, events.mixers(0), events.mixers(1))
