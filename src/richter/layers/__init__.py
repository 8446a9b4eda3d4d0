"""Layer types as linear maps ``z = W h (+ b)`` applied at positions ``s``. One file per layer type.

    register(MyLayer, {"": LinearMap(matrix, inputs, outputs, "dense")})

adds a new type; ``richter.testing.check_layer`` checks that its view is correct.
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
    """One weight matrix as a linear map at positions. All three functions only re-arrange entries: they reshape, slice,
    transpose or unfold. ``matrix`` is applied to gradients and index tensors as well as to weights.

    ===========  =====================  ==================  =====================  ============================
    kind         matrix(module, w)      inputs(module, x)   outputs(module, z)     gradient in the matrix
    ===========  =====================  ==================  =====================  ============================
    dense        d_out d_in             n s d_in            n s d_out              sum_s g h^T
    grouped      r d_out/r d_in/r       n s r d_in/r        n s r d_out/r          sum_s g_r h_r^T per group r
    diagonal     d                      n s d               n s d                  sum_s g * h
    lookup       d_out d_in             n s (indices)       n s d_out              sum_s g e_index^T
    ===========  =====================  ==================  =====================  ============================
    ``n`` may be any leading axis of the layer's input: the axis of the examples is found during capture. A lookup index of -1
    reads nothing (a padding index has no gradient). ``outputs`` may unfold the module's output into more numbers: for overlapping
    patches that are summed (a transposed convolution), the backward signal of each patch is that of the sum.
    """

    matrix: Callable[[nn.Module, Tensor], Tensor]
    inputs: Callable[[nn.Module, Tensor], Tensor]
    outputs: Callable[[nn.Module, Tensor], Tensor]
    kind: Kind = "dense"
    weight: str = "weight"  # attribute of the module that contains the weight
    # returns the input from all arguments of the module's forward; None: the first argument
    reads: Callable[..., Tensor] | None = None
    apply: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None  # (module, input, matrix) -> the module's output
    # without bias, if that is faster than unfolding the input


View = dict[str, LinearMap]
ViewOf = Callable[[str, nn.Module], View]  # for views that depend on the instance: (qualified name, module) -> View

_VIEWS: dict[type[nn.Module] | str, View | ViewOf] = {}


def register(kind: type[nn.Module] | str, view: View | ViewOf) -> None:
    """Register modules of type ``kind`` as linear maps. A string is a qualified class name (``"package.module.Class"``), so that
    a library need not be imported."""
    _VIEWS[kind] = view


def registered() -> list[tuple[type[nn.Module] | str, int]]:
    """The known types of modules, and the ids of their views: another list after every ``register``."""
    return [(kind, id(view)) for kind, view in _VIEWS.items()]


def view_of(name: str, module: nn.Module) -> View:
    """Return the linear maps of one module; empty if its type (or its own forward) is not known."""
    for kind in type(module).__mro__:
        view = _VIEWS.get(kind) or _VIEWS.get(f"{kind.__module__}.{kind.__qualname__}")
        if view is None:
            continue
        if type(module).forward is not kind.forward and not _parametrised_forward(module, kind):  # type: ignore[attr-defined]
            return {}  # a subclass with another forward; instrument/capture finds the uses of its weight
        return view(name, module) if callable(view) else view
    return {}


def _parametrised_forward(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a subclass made by torch.nn.utils.parametrize still has the forward of its base class."""
    return getattr(type(module).forward, "__qualname__", "") == getattr(kind.forward, "__qualname__", None)


TAKEN_APART: dict[Any, Callable[..., Any]] = {}  # torch functions that multiply several matrices, with their replacements


def takes_apart(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a replacement for torch functions. It is called with the recorder of a forward pass (instrument/capture), the
    function and its arguments. It returns the same result, and passes every matrix product to the recorder."""
    def registered(instead: Callable[..., Any]) -> Callable[..., Any]:
        TAKEN_APART.update(dict.fromkeys(functions, instead))
        return instead
    return registered


for _file in modules(__name__):
    importlib.import_module(_file)  # registers its types

__all__ = ["TAKEN_APART", "Kind", "LinearMap", "View", "register", "takes_apart", "view_of"]
