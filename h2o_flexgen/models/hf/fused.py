"""Fewer, larger operations in place of what transformers' modules do one by one: products of the same tensor, gated
MLPs and norms, by the engine's kernels. What a module does is found by looking at numbers, not by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from inspect import signature
from itertools import permutations
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from h2o_flexgen.config.model.modules import ModuleTensor
from h2o_flexgen.kernels import ACTIVATIONS, gated, layer_norm, rms_norm
from h2o_flexgen.models.decoder import adjacent
from h2o_flexgen.models.hf.build import is_product, multiply, product

Joined = tuple[Tensor, Tensor | None]
Norm = Callable[[nn.Module, Callable[[Tensor], Tensor], Tensor], Tensor]
"""Of a module, its own forward, and what is to be normed."""
Groups = tuple[tuple[str, tuple[ModuleTensor, ...]], ...]

_TOKENS = 4  # of the numbers that are looked at
_EXACTLY = torch.finfo(torch.float32).tiny  # added to a weight it changes nothing, and keeps `rms_norm` from rounding


class SharedInputs:
    """Notes, from its making on, which products of a model on meta are given the same tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._given: list[list[str]] = []
        self._known: dict[int, tuple[ReferenceType[Tensor], int, list[str]]] = {}  # by id, if it is still that tensor
        for path, module in model.named_modules():
            if is_product(module):
                module.register_forward_pre_hook(partial(self._note, path))

    def _note(self, path: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not args or not torch.is_tensor(args[0]):
            return
        x = args[0]
        known = self._known.get(id(x))
        if known is None or known[0]() is not x or known[1] != x._version:
            known = self._known[id(x)] = ref(x), x._version, list[str]()
            self._given.append(known[2])
        known[2].append(path)

    @cached_property
    def joined(self) -> tuple[tuple[str, ...], ...]:
        """The paths of products that are of the same numbers, in the order of their calls; none is called twice."""
        paths = [path for each in self._given for path in each]
        calls = Counter(paths)
        return tuple(tuple(each) for each in self._given if len(each) > 1 and max(calls[p] for p in each) == 1)


def side_by_side(groups: Groups, joined: Iterable[Sequence[str]]) -> Groups:
    """The weight groups with the matrices of joined products one behind another, and so their biases."""
    place = {
        f"{path}.{key}": (number, key != "weight", i)
        for number, paths in enumerate(joined)
        for i, path in enumerate(paths)
        for key in ("weight", "bias")
    }
    found = []
    for name, tensors in groups:
        apart = [each for each in tensors if each.parameter not in place]
        together = [each for each in tensors if each.parameter in place]
        found.append((name, (*sorted(together, key=lambda each: place[each.parameter]), *apart)))
    return tuple(found)


class Joint:
    """Products of one tensor. Where their matrices adjoin in memory they are done as one when the first is asked for;
    the others are given their part of it. `joined`: the matrices, and the biases, that modules have now."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules, self._next = tuple(modules), 0
        self._sizes = [_sizes(module)[0] for module in modules]
        self._x: Tensor | None = None
        self._parts: tuple[Tensor, ...] = ()
        self.joined: Joined | None = None
        for number, module in enumerate(modules):
            module.forward = partial(self._forward, number)

    def look(self) -> Joined | None:
        """What `joined` is for the tensors that the modules have now."""
        weights, biases = ([each._parameters[key] for each in self.modules] for key in ("weight", "bias"))
        weight, bias = as_one(weights), as_one(biases)
        if weight is None or (bias is None and any(each is not None for each in biases)):
            return None
        return weight, bias

    def done(self, x: Tensor) -> tuple[Tensor, ...] | None:
        """All products of x (..., in), views of one tensor; None where they are not one."""
        if self.joined is None:
            return None
        weight, bias = self.joined
        return multiply(weight, x, bias).split_with_sizes(self._sizes, -1)

    def _forward(self, number: int, x: Tensor) -> Tensor:
        if number == 0 and (parts := self.done(x)) is not None:
            self._x, self._parts, self._next = x, parts, 0
        # Another order than the recorded one: another forward has come between.
        if x is not self._x or number != self._next:
            self._x, self._parts = None, ()
            return product(self.modules[number], x)
        part = self._parts[number]
        self._next += 1
        if self._next == len(self.modules):
            self._x, self._parts = None, ()
        return part


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a product that has no weights yet."""
    first, second = module._parameters["weight"].shape  # type: ignore[union-attr]
    return (first, second) if isinstance(module, nn.Linear) else (second, first)


def as_one(parts: Sequence[Any]) -> Tensor | None:
    """Tensors, one behind another in memory, as one; None where they are not."""
    if not all(isinstance(each, Tensor) for each in parts) or not adjacent(list(parts)):
        return None
    first, rows = parts[0], sum(len(each) for each in parts)
    joint: Tensor = first.as_strided((rows, *first.shape[1:]), first.stride())
    return joint


class GatedMlp:
    """In place of the forward of a module that computes down(activation(gate(x)) * up(x)): without a tensor for every
    step. `joint`: of `gate` and `up`, in any order, if these are joined."""

    def __init__(self, module: nn.Module, roles: Sequence[nn.Module], activation: str, joint: Joint | None) -> None:
        self._otherwise = module.forward
        self._gate, self._up, self._down = roles
        self._activation, self._joint = activation, joint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own forward."""
        if kwargs or len(args) != 1 or not torch.is_tensor(args[0]):
            return self._otherwise(*args, **kwargs)
        x: Tensor = args[0]
        rows = x.reshape(-1, x.shape[-1])
        both = None if self._joint is None else self._joint.done(rows)
        if self._joint is None or both is None:
            gate, up = product(self._gate, rows), product(self._up, rows)
        else:
            gate, up = both if self._joint.modules[0] is self._gate else both[::-1]
        return product(self._down, gated(gate, up, self._activation)).view(*x.shape[:-1], -1)


def take_gates(model: nn.Module, joints: Iterable[Joint]) -> None:
    """From now on gated MLPs are computed by our kernels; their products are ours already."""
    known: dict[Any, tuple[list[str], str] | None] = {}
    pairs = {frozenset(joint.modules): joint for joint in joints}
    for module in model.modules():
        products = {name: child for name, child in module.named_children() if is_product(child)}
        if len(products) != 3 or any(True for _ in module.parameters(False)):
            continue
        kind = kind_of(module), tuple((name, _sizes(child)) for name, child in products.items())
        if kind not in known:
            known[kind] = _roles(module, products)
        if (found := known[kind]) is not None:
            roles = [products[name] for name in found[0]]
            module.forward = GatedMlp(module, roles, found[1], pairs.get(frozenset(roles[:2])))


def kind_of(module: nn.Module) -> Any:
    """Modules that have the same of this compute the same of their parameters."""
    plain = [(key, repr(each)) for key, each in vars(module).items() if key[0] != "_" and key != "forward"]
    return type(module), tuple(plain), tuple((key, type(each)) for key, each in module.named_children())


def _roles(module: nn.Module, products: Mapping[str, nn.Module]) -> tuple[list[str], str] | None:
    """Which of three products gates, which is gated and which is behind, and the activation; None: it is no gated MLP.

    The module is run with numbers in place of the products, which tell what it does with these.
    """
    generator, before = torch.Generator().manual_seed(0), {name: child.forward for name, child in products.items()}
    given, answers = dict[str, Tensor](), dict[str, Tensor]()

    def answer(name: str, x: Tensor) -> Tensor:
        given[name] = x
        return answers[name].clone()

    for name, child in products.items():
        answers[name] = torch.randn(1, _TOKENS, _sizes(child)[0], generator=generator) * 20  # clamps would be seen
        child.forward = partial(answer, name)
    x = torch.randn(1, _TOKENS, 8, generator=generator)
    try:
        y = module(x)
    except Exception:  # it is something else then, whatever it is
        return None
    finally:
        for name, child in products.items():
            child.forward = before[name]
    for gate, up, down in permutations(products):
        same = len(given) == 3 and given[gate] is x and given[up] is x and given[down] is not x
        if same and torch.is_tensor(y) and torch.equal(y, answers[down]):
            for activation, compute in ACTIVATIONS.items():
                wanted = compute(answers[gate].clone()) * answers[up]
                if given[down].shape == wanted.shape and torch.allclose(given[down], wanted, rtol=1e-5, atol=1e-4):
                    return [gate, up, down], activation
    return None


def take_norms(model: nn.Module) -> None:
    """From now on norms of bfloat16 numbers are computed by our kernels, those that are known by their numbers."""
    known: dict[Any, Norm | None] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        others = [
            each for key, each in module._parameters.items() if each is not None and key not in ("weight", "bias")
        ]
        if (
            weight is None
            or weight.dim() != 1
            or others
            or module._buffers
            or module._modules
            or not _is_of_one(module)
        ):
            continue
        kind = kind_of(module), len(weight), module._parameters.get("bias") is None
        if kind not in known:
            known[kind] = _norm(module, len(weight))
        if (norm := known[kind]) is not None:
            module.forward = partial(norm, module, module.forward)


def _is_of_one(module: nn.Module) -> bool:
    """Whether a module computes something of one tensor: a gate, even one that may be left out, is another."""
    return len(signature(type(module).forward).parameters) == 2  # itself, and that


def _norm(module: nn.Module, size: int) -> Norm | None:
    """What computes the same as a norm over the last dimension; None where nothing here does."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, size, generator=generator) * torch.tensor([[1e-3], [0.1], [1.0], [30.0]])
    x[0, 1:] += 0.5
    weight, bias = (torch.randn(size, generator=generator) for _ in range(2))
    for eps in {each for key, each in vars(module).items() if "eps" in key and isinstance(each, float)}:
        ways = (partial(_rms, eps, 0.0), partial(_rms, eps, _EXACTLY), partial(_rms, eps, 1.0), partial(_layer, eps))
        for norm in ways:
            dtypes = torch.float32, torch.bfloat16
            if all(_same(module, norm, x.to(each), weight.to(each), bias.to(each)) for each in dtypes):
                return norm
    return None


def _same(module: nn.Module, norm: Norm, x: Tensor, weight: Tensor, bias: Tensor) -> bool:
    before, given = dict(module._parameters), {"weight": weight, "bias": bias}
    module._parameters |= {key: given[key] for key, each in before.items() if each is not None}  # type: ignore[misc]
    try:
        with torch.inference_mode():
            theirs, ours = module(x), norm(module, module.forward, x)
    except Exception:  # it is something else then, whatever it is
        return False
    finally:
        module._parameters.update(before)
    if not torch.is_tensor(theirs) or theirs.shape != x.shape or theirs.dtype is not x.dtype:
        return False
    if x.dtype is torch.float32:
        return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    # Sums are taken in another order: now and then a number is rounded to the other side.
    close = torch.isclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-5)
    return bool(close.all()) and bool((ours == theirs).float().mean() > 0.97)


def _rms(eps: float, offset: float, module: nn.Module, otherwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight = module._parameters["weight"]
    return otherwise(x) if weight.dtype is not x.dtype else rms_norm(x, weight, eps, offset)  # type: ignore[union-attr]


def _layer(eps: float, module: nn.Module, otherwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if weight.dtype is not x.dtype:  # type: ignore[union-attr]
        return otherwise(x)
    return layer_norm(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)
