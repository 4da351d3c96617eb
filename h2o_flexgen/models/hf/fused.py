"""Fewer, larger operations in place of the small ones of transformers' modules: products of the same tensor, gated
MLPs, norms and rotations, by the engine's kernels. A module or function is recognised by the numbers that it computes,
not by its name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from inspect import signature, unwrap
from itertools import permutations
from itertools import product as every
from types import FunctionType, MethodType
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from h2o_flexgen.config.model.modules import ModuleTensor
from h2o_flexgen.kernels.layers import ACTIVATIONS, gated, layer_norm, rms_norm, rotate_heads
from h2o_flexgen.kernels.native import library
from h2o_flexgen.models.decoder import as_one
from h2o_flexgen.models.hf.build import is_product, multiply, product

Joined = tuple[Tensor, Tensor | None]
Norm = Callable[..., Tensor]
"""Of a module, its own forward, and the arguments of that: the tensor to be normed, or this and a gate."""
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
        """The value of `joined` for the tensors that the modules have now."""
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


class GatedMlp:
    """In place of the forward of a module that computes down(activation(gate(x)) * up(x)): without a tensor for every
    step. `joint`: of `gate` and `up`, in any order, if these are joined."""

    def __init__(self, module: nn.Module, roles: Sequence[nn.Module], activation: str, joint: Joint | None) -> None:
        self._otherwise = module.forward
        self._gate, self._up, self._down = roles
        self._activation, self._joint = activation, joint

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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


def take_gates(model: nn.Module, joints: Iterable[Joint], starts: Iterable[str]) -> None:
    """From now on gated MLPs are computed by our kernels; their products are ours already. `starts`: the modules by
    which units begin; an MLP that has one of these is not whole in any."""
    known: dict[Any, tuple[list[str], str] | None] = {}
    pairs, cut = {frozenset(joint.modules): joint for joint in joints}, {path.rpartition(".")[0] for path in starts}
    for path, module in model.named_modules():
        products = {name: child for name, child in module.named_children() if is_product(child)}
        if len(products) != 3 or path in cut or any(True for _ in module.parameters(False)):
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


def take_norms(model: nn.Module, look: Callable[[nn.Module, int], Norm | None] | None = None) -> None:
    """From now on norms of bfloat16 numbers are computed by our kernels, those that are known by their numbers; or what
    `look` finds for modules that have a weight, given its size, perhaps a bias, and nothing else."""
    known: dict[Any, Norm | None] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        held = {key for key, each in module._parameters.items() if each is not None}
        plain = held <= {"weight", "bias"} and not module._buffers and not module._modules
        if weight is None or weight.dim() != 1 or not plain:
            continue
        kind = kind_of(module), len(weight), module._parameters.get("bias") is None
        if kind not in known:
            known[kind] = (look or _norm)(module, len(weight))
        if (norm := known[kind]) is not None:
            module.forward = partial(norm, module, module.forward)


def _norm(module: nn.Module, size: int) -> Norm | None:
    """A function that computes the same as this norm over the last dimension; None where none here does."""
    if len(signature(type(module).forward).parameters) != 2:  # of more than one tensor: a gate may be left out
        return None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _TOKENS, size, generator=generator) * torch.tensor([[1e-3], [0.1], [1.0], [30.0]])
    x[0, 1:] += 0.5
    weight, bias = (torch.randn(size, generator=generator) for _ in range(2))
    for eps in epsilons(module):
        ways = (partial(_rms, eps, 0.0), partial(_rms, eps, _EXACTLY), partial(_rms, eps, 1.0), partial(_layer, eps))
        if (norm := first_same(module, ways, {"weight": weight, "bias": bias}, x)) is not None:
            return norm
    return None


def epsilons(module: nn.Module) -> set[float]:
    return {each for key, each in vars(module).items() if "eps" in key and isinstance(each, float)}


def first_same(module: nn.Module, norms: Iterable[Norm], given: Mapping[str, Tensor], *x: Tensor) -> Norm | None:
    """The first of `norms` that makes of `x` what a module does that has the `given` parameters, in float32 and in
    bfloat16; None where none does, or the module is of another kind."""
    before = dict(module._parameters)

    def same(norm: Norm, dtype: torch.dtype) -> bool:
        own: dict[str, Any] = {key: given[key].to(dtype) for key, each in before.items() if each is not None}
        module._parameters |= own
        some = [each.to(dtype) for each in x]
        try:
            theirs, ours = module(*some), norm(module, module.forward, *some)
        except Exception:  # it is of another kind then
            return False
        if not torch.is_tensor(theirs) or theirs.shape != x[0].shape or theirs.dtype is not ours.dtype:
            return False
        if dtype is torch.bfloat16:
            return rounds_alike(ours, theirs)
        return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)

    try:
        with torch.inference_mode():
            return next((each for each in norms if same(each, torch.float32) and same(each, torch.bfloat16)), None)
    finally:
        module._parameters.update(before)


def _rms(eps: float, offset: float, module: nn.Module, otherwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight = module._parameters["weight"]
    return otherwise(x) if weight.dtype is not x.dtype else rms_norm(x, weight, eps, offset)  # type: ignore[union-attr]


def _layer(eps: float, module: nn.Module, otherwise: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    weight, bias = module._parameters["weight"], module._parameters.get("bias")
    if weight.dtype is not x.dtype:  # type: ignore[union-attr]
        return otherwise(x)
    return layer_norm(x.reshape(-1, x.shape[-1]), weight, bias, eps).view(x.shape)


def plain(module: nn.Module) -> Any:
    """The forward of a module as it is written, or as something here has replaced it: without transformers' wrappers
    that do nothing for a model that is not trained and is called as transformers calls it. A cache by its older name
    would be one too few, which attention refuses."""
    if "forward" in vars(module):
        return module.forward

    def matters(wrapper: Any) -> bool:
        return wrapper.__globals__["__name__"] != "transformers.modeling_layers" and _renamed(wrapper) != "cache"

    return MethodType(unwrap(type(module).forward, stop=matters), module)


def _renamed(wrapper: Any) -> Any:
    """The new name of an argument that a wrapper of `transformers.utils.deprecation` renames; None: another wrapper."""
    if wrapper.__globals__["__name__"] != "transformers.utils.deprecation":
        return None
    closed = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
    return closed["new_name"].cell_contents if "new_name" in closed else None


def among(function: FunctionType, places: Mapping[str, Any]) -> FunctionType:
    """A copy of a function with other globals; the globals of transformers stay as they are."""
    given = {**function.__globals__, **places}
    own = FunctionType(function.__code__, given, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def take_rotations(model: nn.Module) -> None:
    """From now on queries and keys of bfloat16 numbers are rotated by our kernel, where a module calls a function of
    these that is known by its numbers."""
    made: dict[FunctionType, FunctionType | None] = {}
    for module in model.modules() if library() is not None else ():
        forward = plain(module)
        function = forward.__func__ if isinstance(forward, MethodType) else None
        if not isinstance(function, FunctionType):
            continue
        if function not in made:
            named = ((name, function.__globals__.get(name)) for name in function.__code__.co_names)
            found = {name: _rotation(each) for name, each in named if isinstance(each, FunctionType)}
            ours = {name: each for name, each in found.items() if each is not None}
            made[function] = among(function, ours) if ours else None
        if (own := made[function]) is not None:
            module.forward = MethodType(own, module)


@cache
def _rotation(function: FunctionType) -> Callable[..., Any] | None:
    """A rotation that equals a function of (q, k, cos, sin) or (x, cos, sin); None where none here does."""
    names = tuple(signature(function).parameters)
    alone = names[:3] == ("x", "cos", "sin")
    if not alone and names[:4] != ("q", "k", "cos", "sin"):
        return None
    generator = torch.Generator().manual_seed(0)

    def numbers(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).bfloat16()

    heads = [numbers(1, _TOKENS, count, 32).transpose(1, 2) for count in ((4,) if alone else (4, 2))]
    parts = [(numbers(1, _TOKENS, dim), numbers(1, _TOKENS, dim)) for dim in (32, 16)]
    theirs = [_rotated_by(function, *heads, *angles) for angles in parts]
    for rounds, some in every((True, False), repeat=2):
        how = _Rotation(function, len(heads), rounds, some)
        ours = [how.turned(heads, *angles, 1) for angles in (parts if some else parts[:1])]
        if all(_alike(mine, other, rounds) for mine, other in zip(ours, theirs, strict=False)):
            return how
    return None


class _Rotation:
    """In place of a function that rotates `count` tensors. `rounds`: see `rotate_heads`. `some`: there may be fewer
    angles than dimensions, of which the last then stay."""

    def __init__(self, original: Callable[..., Any], count: int, rounds: bool, some: bool) -> None:
        self._original, self._count, self._rounds, self._some = original, count, rounds, some

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == self._count + 2 and (not kwargs or kwargs.keys() == {"unsqueeze_dim"}):
            made = self.turned(args[: self._count], args[-2], args[-1], kwargs.get("unsqueeze_dim", 1))
            if made is not None:
                return made if self._count > 1 else made[0]
        return self._original(*args, **kwargs)

    def turned(self, x: Sequence[Tensor], cos: Tensor, sin: Tensor, heads_at: int) -> tuple[Tensor, ...] | None:
        """Each (1, heads, T, d), or (1, T, heads, d) where `heads_at` is 2; None where the kernel does not take it."""
        q, k = x[0], x[-1]
        fits = q.dim() == k.dim() == 4 and cos.dim() == 3 and len(q) == len(k) == len(cos) == 1
        if not fits or heads_at not in (1, 2) or (cos.shape[-1] != q.shape[-1] and not self._some):
            return None
        q, k = (q[0].transpose(0, 1), k[0].transpose(0, 1)) if heads_at == 1 else (q[0], k[0])
        made = rotate_heads(q, k if self._count > 1 else None, cos[0], sin[0], rounds=self._rounds)
        if made is None:
            return None
        return tuple((each.transpose(0, 1) if heads_at == 1 else each).unsqueeze(0) for each in made[: self._count])


def _rotated_by(function: Callable[..., Any], *args: Tensor) -> tuple[Tensor, ...] | None:
    try:
        with torch.inference_mode():
            made = function(*args)
    except Exception:  # it is of something else, or of all dimensions
        return None
    made = (made,) if torch.is_tensor(made) else made
    return made if isinstance(made, tuple) and all(torch.is_tensor(each) for each in made) else None


def _alike(ours: Sequence[Tensor] | None, theirs: Sequence[Tensor] | None, exactly: bool) -> bool:
    if ours is None or theirs is None or [each.shape for each in ours] != [each.shape for each in theirs]:
        return False
    pairs = list(zip(ours, theirs, strict=True))
    if exactly or any(each.dtype is not torch.bfloat16 for each in theirs):
        return all(torch.equal(mine, other) and mine.dtype is other.dtype for mine, other in pairs)
    return all(rounds_alike(mine, other) for mine, other in pairs)


def rounds_alike(ours: Tensor, theirs: Tensor) -> bool:
    """Whether sums are but taken in another order: now and then a number is rounded to the other side."""
    close = torch.isclose(ours.float(), theirs.float(), rtol=1e-2, atol=1e-5)
    return bool(close.all()) and bool((ours == theirs).float().mean() > 0.97)
