"""How each layer type is a linear map ``z = W h (+ b)`` applied at positions ``s``. One file per layer type.

    register(MyLayer, {"": LinearMap(matrix, inputs, outputs, "dense")})

teaches Richter a new one; ``richter.testing.check_layer`` says whether the view is right.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from richter.core.catalogue import modules

Kind = Literal["dense", "grouped", "diagonal", "lookup"]


@dataclass(frozen=True)
class LinearMap:
    """One weight matrix as a linear map at positions. All three functions only re-arrange: they reshape, slice,
    transpose or unfold, and ``matrix`` is applied to gradients and index tensors as well as to weights.

    ===========  =====================  ==================  =====================  ============================
    kind         matrix(module, w)      inputs(module, x)   outputs(module, z)     gradient in the matrix
    ===========  =====================  ==================  =====================  ============================
    dense        d_out d_in             n s d_in            n s d_out              sum_s g h^T
    grouped      r d_out/r d_in/r       n s r d_in/r        n s r d_out/r          sum_s g_r h_r^T per group r
    diagonal     d                      n s d               n s d                  sum_s g * h
    lookup       d_out d_in             n s (indices)       n s d_out              sum_s g e_index^T
    ===========  =====================  ==================  =====================  ============================

    ``n`` may be any leading axis the layer sees: which axis holds the examples is found while capturing.
    A lookup index of -1 reads nothing (a padding index has no gradient). ``outputs`` may unfold what the module returned into
    more numbers: of overlapping patches that add up (a transposed convolution), each is asked for what their sum is.
    """

    matrix: Callable[[nn.Module, Tensor], Tensor]
    inputs: Callable[[nn.Module, Tensor], Tensor]
    outputs: Callable[[nn.Module, Tensor], Tensor]
    kind: Kind = "dense"
    weight: str = "weight"  # the module's attribute that holds the weight
    reads: Callable[..., Tensor] | None = None  # what it reads, from all arguments of the module's forward; None: the first
    apply: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None  # (module, what it read, matrix) -> what it would return
    # without bias, where that is quicker than to unfold what it read


View = dict[str, LinearMap]
ViewOf = Callable[[str, nn.Module], View]  # when the view depends on the instance: (qualified name, module) -> View

_VIEWS: dict[type[nn.Module] | str, View | ViewOf] = {}


def register(kind: type[nn.Module] | str, view: View | ViewOf) -> None:
    """Teach Richter that modules of type ``kind`` are linear maps. A string is a qualified class name
    (``"package.module.Class"``), so that a library need not be imported to be known."""
    _VIEWS[kind] = view


def view_of(name: str, module: nn.Module) -> View:
    """The linear maps of one module; empty when its type (or its own forward) is not known."""
    for kind in type(module).__mro__:
        view = _VIEWS.get(kind) or _VIEWS.get(f"{kind.__module__}.{kind.__qualname__}")
        if view is None:
            continue
        if type(module).forward is not kind.forward and not _parametrised_forward(module, kind):  # type: ignore[attr-defined]
            return {}  # a subclass that computes something else: what it does with its weight is seen in instrument/capture
        return view(name, module) if callable(view) else view
    return {}


def _parametrised_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """torch.nn.utils.parametrize swaps in a subclass made on the fly; it keeps the forward."""
    return getattr(type(module).forward, "__qualname__", "") == getattr(kind.forward, "__qualname__", None)


TAKEN_APART: dict[Any, Callable[..., Any]] = {}  # functions of torch that multiply several matrices, and what is called instead


def takes_apart(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what is called instead of some functions of torch, with the recorder of a forward pass (instrument/capture), the
    function and its arguments. It returns what the function returns, and tells the recorder of every product of a matrix."""
    def registered(instead: Callable[..., Any]) -> Callable[..., Any]:
        TAKEN_APART.update(dict.fromkeys(functions, instead))
        return instead
    return registered


for _file in modules(__name__):
    importlib.import_module(_file)  # registers its types

__all__ = ["TAKEN_APART", "Kind", "LinearMap", "View", "register", "takes_apart", "view_of"]
