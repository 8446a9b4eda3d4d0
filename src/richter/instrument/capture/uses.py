"""Uses of a parameter as a matrix outside the forward of the module that owns it: F.linear, matmul, einsum and embedding on it,
and the projections inside nn.MultiheadAttention."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from richter.instrument.capture.state import State
from richter.layers import LinearMap, View, view_of
from richter.layers.attention import split, whole
from richter.layers.embedding import LOOKUP

MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
ADDMMS = {torch.addmm, Tensor.addmm}

AS_IT_IS = whole("weight")
TRANSPOSED = LinearMap(matrix=lambda m, w: w.T, inputs=AS_IT_IS.inputs, outputs=AS_IT_IS.outputs)


class Use(NamedTuple):
    """A weight, what it is multiplied with, and how that is a linear map."""

    name: str  # of the map
    map: LinearMap
    module: nn.Module  # that owns the weight
    weight: Tensor
    read: Tensor


class Scope:
    """Whose the parameters of a model are, and whose forward is running."""

    def __init__(self, model: nn.Module, state: State) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.names: dict[int, str] = {}  # id of a weight -> the first of its names
        for name, weight in state.items():
            if weight.requires_grad:
                self.names.setdefault(id(weight), name)
        self.views: dict[nn.Module, tuple[str, View]] = {}  # modules that are known to be linear maps
        for name, module in self.modules.items():
            if module not in self.views and (view := view_of(name, module)):
                self.views[module] = (name, view)
        self.path: list[nn.Module] = []  # the modules whose forward is running, the innermost last

    @property
    def running(self) -> nn.Module | None:
        return self.path[-1] if self.path else None

    def view(self, module: nn.Module | None) -> View:
        return {} if module is None else self.views.get(module, ("", {}))[1]

    def use(self, func: Any, args: Any, kwargs: Any) -> Use | None:
        """What a call of ``func`` does with a parameter that is not the running module's own; None if nothing."""
        if func is F.embedding:
            x, w = [*args, *kwargs.values()][:2]
            plain = not any(args[2:]) and len(kwargs) == 0
            return self._named(x, w, LOOKUP[""]) if self._foreign(w) and plain else None
        product = _product(func, args, kwargs)
        if product is None:
            return None
        x, w, transposed = product
        if not isinstance(w, Tensor) or not isinstance(x, Tensor) or w.dim() != 2:
            return None
        base = w._base
        if base is not None and id(base) in self.names and w.shape == base.shape[::-1] \
                and w.stride() == base.stride()[::-1]:
            w, transposed = base, not transposed  # the parameter behind .T
        return self._named(x, w, TRANSPOSED if transposed else AS_IT_IS) if self._foreign(w) else None

    def projection(self, which: str, x: Tensor, weight: Tensor) -> Use:
        """One of the four maps of nn.MultiheadAttention, whose forward is running: q, k, v or out_proj."""
        attention = self.model if self.running is None else self.running
        name = next((k for k, module in self.modules.items() if module is attention), "")
        owner, m, parameter = attention, whole(f"{which}_proj_weight"), weight
        if which == "out_proj":
            owner, m = getattr(attention, "out_proj", attention), whole("weight")
        elif weight._base is not None and id(weight._base) in self.names:
            m, parameter = split(which), weight._base  # a third of in_proj_weight
        return Use(f"{name}.{which}" if name else which, m, owner, parameter, x)

    def _foreign(self, w: Any) -> bool:
        """Is ``w`` a parameter, and not the weight of the module whose own forward is running?"""
        if id(w) not in self.names:
            return False
        return not any(getattr(self.running, m.weight, None) is w for m in self.view(self.running).values())

    def _named(self, x: Tensor, w: Tensor, m: LinearMap) -> Use:
        """``block.proj`` for a raw parameter; a weight named "weight" goes by its module, read backwards by ``.T``."""
        parameter = self.names[id(w)]
        owner, _, attribute = parameter.rpartition(".")
        module, name = self.modules[owner], parameter
        if attribute == "weight":
            known = self.view(module)
            own = known.get("")
            if not known or (len(known) == 1 and own is not None and m is AS_IT_IS and own.kind == "dense"):
                name = owner
            elif m is TRANSPOSED or (own is not None and own.kind == "lookup"):
                name = f"{owner}.T"
        return Use(name, m, module, w, x)


def _product(func: Any, args: Any, kwargs: Any) -> tuple[Any, Any, bool] | None:
    """(input, weight, is the weight d_in x d_out?) of a call that is a matrix product; None of any other."""
    if func is F.linear:
        x, w = [*args, *kwargs.values()][:2]
        return x, w, False
    if func in MATMULS and len(args) == 2:
        return args[0], args[1], True
    if func in ADDMMS and len(args) == 3:
        return args[1], args[2], True
    if func is torch.einsum and len(args) == 3 and isinstance(args[0], str):
        transposed = _is_matrix_product(args[0])
        return None if transposed is None else (args[1], args[2], transposed)
    return None


def _is_matrix_product(equation: str) -> bool | None:
    """"nd,do->no": True (W is d_in x d_out); "nd,od->no": False; anything else: None."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    operands = left.split(",")
    if not arrow or len(operands) != 2 or len(operands[1]) != 2 or not operands[0] or not out:
        return None
    (x, w), (i, o) = operands, (operands[0][-1], out[-1])
    if x[:-1] != out[:-1] or i == o or i in x[:-1] or o in x[:-1]:
        return None
    return {i + o: True, o + i: False}.get(w)
