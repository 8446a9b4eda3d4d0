"""Calls that multiply two tensors and add up: F.linear, matmul and its kin, einsum, tensordot. Each axis of the two operands and
of the result gets a label; equal labels are the same axis."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Labels = tuple[Any, ...]  # one for each axis


class Product(NamedTuple):
    """result[out] = sum over what is not in out of a[in_a] b[in_b]; an axis of length one goes with any length."""

    a: Tensor
    in_a: Labels
    b: Tensor
    in_b: Labels
    out: Labels

    def sides(self) -> Iterator[tuple[Tensor, Labels, Tensor, Labels]]:
        """(weight, its labels, what it is multiplied with, its labels), with either operand as the weight."""
        yield self.b, self.in_b, self.a, self.in_a
        yield self.a, self.in_a, self.b, self.in_b


def product(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Product | None:
    """How the call multiplies two tensors; None if it does something else, or something more."""
    known = _KNOWN.get(func)
    if known is None or kwargs.get("out") is not None or kwargs.get("alpha", 1) != 1:
        return None
    return known(*args, **{name: value for name, value in kwargs.items() if name not in ("out", "alpha", "beta")})


def _matmul(p: int, q: int) -> tuple[Labels, Labels, Labels] | None:
    """Of operands with p and q axes: the leading ones are matched from behind."""
    if not p or not q:
        return None
    batch = tuple(range(max(p, q, 2) - 2))
    rows, columns = (("row",) if p > 1 else ()), (("column",) if q > 1 else ())
    in_a = (*batch[len(batch) - max(p - 2, 0):], *rows, "sum")
    in_b = (*batch[len(batch) - max(q - 2, 0):], "sum", *columns)
    return in_a, in_b, (*batch, *rows, *columns)


def _inner(p: int, q: int) -> tuple[Labels, Labels, Labels] | None:
    """The last axes are summed over: F.linear, and torch.inner."""
    if not p or not q:
        return None
    rows, columns = tuple(("row", i) for i in range(p - 1)), tuple(("column", i) for i in range(q - 1))
    return (*rows, "sum"), (*columns, "sum"), (*rows, *columns)


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2) -> Product | None:
    """``dims``: how many of the last and first axes are summed over, or which."""
    p, q = a.dim(), b.dim()
    if isinstance(dims, Tensor):
        return None
    left, right = ([*range(p - dims, p)], [*range(dims)]) if isinstance(dims, int) else map(list, dims)
    in_a: list[Any] = [("row", i) for i in range(p)]
    in_b: list[Any] = [("column", i) for i in range(q)]
    for i, j in zip(left, right, strict=True):
        in_a[i] = in_b[j] = ("sum", i % p)
    return Product(a, tuple(in_a), b, tuple(in_b), tuple(k for k in (*in_a, *in_b) if k[0] != "sum"))


def _einsum(equation: str, *operands: Any) -> Product | None:
    """Of two operands, with or without an arrow and an ellipsis; not with axes given as lists."""
    if not isinstance(equation, str):
        return None
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(operands) != 2 or len(terms) != 2 or not all(isinstance(t, Tensor) for t in operands):
        return None
    letters = [k for k in sorted(left) if k.isalpha() and left.count(k) == 1]
    lengths = [max(t.dim() - len(term.replace("...", "")), 0) if "..." in term else 0
               for t, term in zip(operands, terms, strict=True)]
    widest = max(lengths)
    dots = {m: tuple(("dot", widest - m + i) for i in range(m)) for m in (*lengths, widest)}
    in_a, in_b = (_labels(term, dots[m]) for term, m in zip(terms, lengths, strict=True))
    out = _labels(right, dots[widest]) if arrow else (*dots[widest], *letters)
    return Product(operands[0], in_a, operands[1], in_b, out)


def _labels(term: str, dots: Labels) -> Labels:
    before, ellipsis, after = term.partition("...")
    return (*before, *(dots if ellipsis else ()), *after)


def _of(label: Callable[[int, int], tuple[Labels, Labels, Labels] | None], *names: str) -> Callable[..., Product | None]:
    """A function with arguments of these names, of which the last two are the operands."""
    def parse(*args: Any, **kwargs: Any) -> Product | None:
        given = dict(zip(names, args, strict=False)) | kwargs
        a, b = given.get(names[-2]), given.get(names[-1])
        if not isinstance(a, Tensor) or not isinstance(b, Tensor):
            return None
        labels = label(a.dim(), b.dim())
        return None if labels is None else Product(a, labels[0], b, labels[1], labels[2])
    return parse


def _known() -> dict[Any, Callable[..., Product | None]]:
    """Every function that is known, and how its arguments are read."""
    table: dict[Any, Callable[..., Product | None]] = {F.linear: _of(_inner, "input", "weight"),
                                                       torch.tensordot: _tensordot, torch.einsum: _einsum}
    operands = {"matmul": ("input", "other"), "mm": ("input", "mat2"), "bmm": ("input", "mat2"), "mv": ("input", "vec"),
                "dot": ("input", "tensor"), "addmm": ("input", "mat1", "mat2"), "baddbmm": ("input", "batch1", "batch2"),
                "addmv": ("input", "mat", "vec")}
    for owner, (name, names) in itertools.product((torch, Tensor), operands.items()):
        table[getattr(owner, name)] = _of(_matmul, *names)
    table |= dict.fromkeys((Tensor.__matmul__, torch.linalg.matmul), _of(_matmul, "input", "other"))
    table |= dict.fromkeys((torch.inner, Tensor.inner), _of(_inner, "input", "other"))
    table[Tensor.__rmatmul__] = lambda b, a: _of(_matmul, "input", "other")(a, b)
    return table


_KNOWN = _known()
