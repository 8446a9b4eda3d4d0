"""The run-time checker of shapes: what is annotated with a shape must have it. Other types are left to mypy, because much of the
library takes arrays, lists or files of several kinds, and says itself, in a sentence, what it cannot take."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isfunction
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from beartype import BeartypeConf, beartype
from jaxtyping import AbstractArray, jaxtyped

PLAIN = (NoneType, torch.Tensor, Any, int, float, str, bool, ...)


def typechecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """Checks the parameters and the result that are arrays with a shape, or plain containers of them."""
    shapes = {name: hint for name, hint in function.__annotations__.items() if _has_shape(hint) and _is_checkable(hint)}
    if not shapes:
        return function
    function.__annotations__ = shapes
    return beartype(conf=BeartypeConf(is_pep484_tower=True))(function)  # an int is a float, as in PEP 484


def where_shaped(function: Any = None, *, typechecker: Callable[..., Any]) -> Any:
    """`jaxtyping.jaxtyped`, but a function without a shape stays as it is: to bind the arguments of each of its calls would take
    a sixth of the time of a measurement."""
    if function is None:
        return partial(where_shaped, typechecker=typechecker)
    if isfunction(function) and not any(_may_have_shape(hint, function) for hint in function.__annotations__.values()):
        return function
    return jaxtyped(function, typechecker=typechecker)


def _may_have_shape(hint: Any, function: Callable[..., Any]) -> bool:
    try:
        known = eval(hint, function.__globals__) if isinstance(hint, str) else hint
    except Exception:  # a name of its class, or one that only type checkers know
        return True
    return isinstance(known, str) or _has_shape(known)


def _has_shape(hint: Any) -> bool:
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(_has_shape(part) for part in get_args(hint))


def _is_checkable(hint: Any) -> bool:
    if get_origin(hint) in (Union, UnionType, tuple, list, dict):
        return all(_is_checkable(part) for part in get_args(hint))
    return hint in PLAIN or (isinstance(hint, type) and issubclass(hint, AbstractArray))
