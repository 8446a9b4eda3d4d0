"""Kernels of single linear maps: products of per-example gradients between two batches, added up in tiles, and what they cost.

A kernel is "n m" (trace), "v n m" (diagonal) or "v n w m" (full). Where both batches are the same, entries above the diagonal
(of examples; of tiles in a full kernel) are undefined until ``mirror`` fills them. Dot products are taken in the model's
precision; sums over outputs, tiles and parameters are added up in the dtype of the kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from richter.core import MemoryBudgetError, show_bytes
from richter.core.values import table
from richter.instrument.stream import LayerCapture, RowCotangents, steps
from richter.instrument.survey import MapInfo, Network, Survey

Form = Literal["trace", "diagonal", "full"]
Way = Literal["pairs", "gradients", "features"]
FORMS = ("trace", "diagonal", "full")
ROWS = 1024  # rows of a tile of products
SQUARE, PARTS = 96, 6  # rows of a block of a symmetric product, and at most so many blocks: more blocks save less than they cost
SHORT = 2  # products over pairs of positions and outputs are short, and take this many times as long per operation
NUMBERS = 2 ** 21  # entries of a tile of gradients, which should stay in the cache between being made and being used
TOGETHER = 2 ** 24  # bytes of the gradients of several cotangents that a trace takes at a time
MOST = 2 ** 25  # entries of the gradients of a shared parameter that are formed

# ------------------------------------------------------------------------------------------------ operations and memory


@dataclass(frozen=True)
class Size:
    """The sizes that decide the cost of one map's kernel: n examples of s positions against m of t, v cotangents."""

    kind: str
    n: int
    m: int
    s: int
    t: int
    v: int
    d_in: int
    d_out: int
    groups: int = 1
    same: bool = True

    @property
    def p(self) -> int:
        """Number of weights per position that a gradient has."""
        return self.d_out * (1 if self.kind == "diagonal" else self.d_in // self.groups)


def widths(kind: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """(d_in, d_out, groups) of a map with a matrix of this shape."""
    if kind == "grouped":
        return shape[0] * shape[2], shape[0] * shape[1], shape[0]
    return (1 if kind == "diagonal" else shape[-1]), shape[0], 1


def size_of_map(info: MapInfo, n: int, m: int, v: int, same: bool) -> Size:
    """Sizes of the contraction of one map for n and m examples and v cotangents."""
    s = positions(info)
    return Size(info.kind, n, m, s, s, v, *widths(info.kind, info.shape), same)


def positions(info: MapInfo) -> int:
    """Positions that a contraction goes over: the live ones where they are at most half (see Recording.trimmed)."""
    return info.live if info.silent else info.positions


def costs(z: Size, outputs: Form) -> dict[Way, tuple[float, int]]:
    """(operations, numbers held meanwhile) of each contraction that computes one map's kernel."""
    half, sides = (0.5, z.n * z.s) if z.same else (1.0, z.n * z.s + z.m * z.t)
    v2 = z.v * z.v if outputs == "full" else z.v
    rows = z.v if outputs == "full" else 1
    width = min(z.d_in, sides) * z.d_out if z.kind == "lookup" else z.p
    making = 2 * z.v * sides * (z.d_out if z.kind in ("lookup", "diagonal") else z.p)
    by_gradients = making + half * 2 * v2 * z.n * z.m * width
    tile = 2 * min(max(NUMBERS, rows * max(z.n, z.m) * 8 * max(1, width // z.d_out)), rows * max(z.n, z.m) * width)
    product = _product_numbers(z, outputs)
    if z.kind not in ("dense", "lookup"):
        return {"features": (by_gradients, tile + product)}
    reading = 1 if z.kind == "lookup" else z.d_in
    if outputs != "full" or z.s == z.t == 1:
        by_pairs = half * 2 * z.n * z.m * z.s * z.t * (reading + v2 * z.d_out)
        held = (2 * z.v + 1 if outputs == "diagonal" else 2) * z.n * z.m * z.s * z.t
    else:
        by_pairs = half * 2 * z.n * z.m * z.s * (z.t * reading + z.t * z.v * z.d_out + v2 * z.d_out)
        held = z.v * z.v * z.n * z.m + 2 * z.v * z.m * z.s * z.d_out * examples_at_once(z.n, z.v * z.m * z.s * z.d_out)
    return {"pairs": (by_pairs, held + (product if outputs == "full" else 0)), "gradients": (by_gradients, tile + product)}


def _product_numbers(z: Size, outputs: Form) -> int:
    """Entries of the largest product that ``add_products`` holds."""
    if outputs == "full":
        return min(tile_rows(z.v * z.n), z.v * z.n) * min(max(4 * ROWS, z.m), z.v * z.m)
    return (z.v if outputs == "diagonal" else 1) * min(tile_rows(z.n) if z.same else ROWS, z.n) * min(max(4 * ROWS, z.n), z.m)


@functools.lru_cache(maxsize=1024)
def cheapest(z: Size, outputs: Form) -> Way:
    """Return the way to contract with the fewest operations."""
    found = costs(z, outputs)
    short = SHORT if outputs == "full" and z.s * z.t > 1 else 1
    return min(found, key=lambda way: found[way][0] * (short if way == "pairs" else 1))


def examples_at_once(n: int, each: int) -> int:
    """The number of examples of ``each`` numbers that fit into a tile."""
    return min(n, max(1, NUMBERS // each))


def tile_rows(n: int) -> int:
    """Rows of a tile of a symmetric product of n rows: little of it is computed twice, and the product runs at full speed."""
    return min(ROWS, max(64, n // 5))


# --------------------------------------------------------------------------------------------------- products in tiles


class Scratch:
    """Memory for tiles that is reused: touching fresh memory costs more than filling it with a product."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def take(self, what: str, like: Tensor, *shape: int) -> Tensor:
        """Return an empty tensor in the place of the last one of that name. Ask for the largest one first."""
        size, kept = math.prod(shape), self.kept.get(what)
        if kept is None or len(kept) < size or kept.dtype != like.dtype:
            self.kept.pop(what, None)
            self.kept[what] = kept = like.new_empty(size)
        return kept[:size].view(shape)


def tiles(v: int, n: int) -> list[tuple[slice, slice]]:
    """Tiles of the rows "v n" of a full kernel, in the order of the rows."""
    size = tile_rows(v * n)
    if n >= size:
        return [(slice(k, k + 1), rows) for k in range(v) for rows in steps(n, size)]
    return [(k, slice(0, n)) for k in steps(v, size // n)]


def _below(n: int, m: int, size: int, same: bool) -> Iterator[tuple[slice, slice]]:
    """Pairs of blocks of rows and columns, only on and below the diagonal if both sides are the same."""
    for rows in steps(n, size):
        for columns in [slice(0, rows.stop)] if same else steps(m, 4 * ROWS):
            yield rows, columns


def mirror(K: Tensor, outputs: Form) -> Tensor:
    """Fill the entries above the diagonal of a symmetric kernel."""
    if outputs == "full":
        v, n = K.shape[:2]
        grid = tiles(v, n)
        for i, (a, rows) in enumerate(grid):
            for b, columns in grid[:i]:
                K[b, columns, a, rows] = K[a, rows, b, columns].permute(2, 3, 0, 1)
        return K
    for rows in steps(K.shape[-1], 64):
        K[..., :rows.start, rows] = K[..., rows, :rows.start].mT
        square = K[..., rows, rows]
        square.copy_(square.tril() + square.tril(-1).mT)
    return K


def add_products(K: Tensor, A: Tensor, B: Tensor, outputs: Form, same: bool, room: Scratch,
                 scale: Tensor | None = None) -> None:
    """Add products of features A "v n p" with B "w m p" to K; a full kernel's times ``scale`` "n m" if it is given."""
    if outputs == "full":
        left, right = tiles(*A.shape[:2]), tiles(*B.shape[:2])
        for i, (v, rows) in reversed(list(enumerate(left))):  # the longest strip first: see Scratch
            if rows == slice(0, A.shape[1]):  # whole outputs: one long product instead of many tiles
                outputs_at_once = max(1, 4 * ROWS // B.shape[1])
                strip = [(w, slice(0, B.shape[1])) for w in steps(v.stop if same else len(B), outputs_at_once)]
            else:
                strip = right[:i + 1] if same else right
            a = A[v, rows]
            for w, columns in strip:
                b = B[w, columns]
                P = room.take("products", A, *a.shape[:2], *b.shape[:2])
                torch.mm(a.flatten(0, 1), b.flatten(0, 1).T, out=P.view(a.shape[:2].numel(), -1))
                if scale is None:
                    K[v, rows, w, columns] += P
                else:
                    K[v, rows, w, columns].addcmul_(P, scale[rows, None, columns])
        return
    n, m = A.shape[1], B.shape[1]
    for rows, columns in _below(n, m, tile_rows(n) if same else ROWS, same):
        if outputs == "trace":
            P = A[0, rows] @ B[0, columns].T
            for a, b in zip(A[1:], B[1:], strict=True):
                P.addmm_(a[rows], b[columns].T)
        else:
            P = torch.bmm(A[:, rows], B[:, columns].mT)
        K[..., rows, columns] += P


# ------------------------------------------------------------------------------------------------- per-example gradients


def live_positions(c: LayerCapture) -> Tensor:
    """The positions at which each cotangent has a gradient in some example, "v s"."""
    return (c.g != 0).flatten(3).any(3).any(1)


def at_positions(c: LayerCapture, k: int, live: Tensor) -> LayerCapture:
    """Cotangent k at its live positions; at the first position if there is none."""
    chosen = live.nonzero()[:, 0] if bool(live.any()) else torch.zeros(1, dtype=torch.int64, device=live.device)
    return replace(c, h=c.h[:, chosen], g=c.g[k:k + 1, :, chosen])


def bias_gradients(c: LayerCapture) -> Tensor:
    """Per-example gradients in the bias, "v n p"."""
    return (c.g[:, :, 0] if c.g.shape[2] == 1 else c.g.sum(2)).flatten(2)


def gradient_tiles(c: LayerCapture, room: Scratch, what: str = "tile", index: Tensor | None = None, rows: int = 0,
                   examples: int = 0) -> Iterator[Tensor]:
    """Yield per-example gradients in the map's matrix, "v n p", some rows of the matrix at a time, so that a tile of at least
    ``examples`` examples has NUMBERS entries. A lookup may be read through an ``index`` into so many ``rows``. Large tiles lie in
    the ``room`` under the name ``what``; the next tile overwrites them."""
    v, n, s = c.g.shape[:3]
    each = v * max(n, examples)
    if c.kind == "diagonal":
        yield (c.g * c.h).sum(2)
        return
    if c.kind == "grouped":
        r, d_out, d_in = c.W.shape
        for some in steps(r, max(1, NUMBERS // (each * d_out * d_in))):
            yield torch.einsum("vnsro,nsri->vnroi", c.g[..., some, :], c.h[..., some, :]).flatten(2)
        return
    d_out, d_in = c.g.shape[3], rows or c.W.shape[1]
    for some in steps(d_out, max(8, NUMBERS // (each * d_in))):
        width = some.stop - some.start
        if c.kind == "dense":
            J = room.take(what, c.g, v, n, width, d_in)
            for k in range(v):
                torch.bmm(c.g[k, ..., some].mT, c.h, out=J[k])
        else:
            J = room.take(what, c.g, v, n, d_in, width).zero_()
            read = (c.h if index is None else index).clamp(min=0)[None, :, :, None].expand(v, n, s, width)
            J.scatter_add_(2, read, c.g[..., some] * (c.h >= 0)[None, :, :, None])
            J = J.mT if index is None else J  # rows of the matrix first, unless it is only compared with its like
        yield J.flatten(2)


def gradients(c: LayerCapture) -> Tensor:
    """Per-example gradients in the whole matrix, "v n p"."""
    return torch.cat([J.clone() for J in gradient_tiles(c, Scratch())], 2)


def add_gradients(K: Tensor, a: LayerCapture, b: LayerCapture, outputs: Form, room: Scratch) -> None:
    """Add the kernel of a map's matrix to K by per-example gradients, one tile at a time."""
    same, ia, ib, used = b is a, None, None, 0
    if a.kind == "lookup":  # indices among those that occur: most of a vocabulary is not read
        words, index = torch.unique(torch.cat([a.h.flatten(), b.h.flatten()]), return_inverse=True)
        ia, ib, used = index[:a.h.numel()].view(a.h.shape), index[a.h.numel():].view(b.h.shape), len(words)
    most = max(a.g.shape[1], b.g.shape[1])
    right = gradient_tiles(b, room, "other tile", ib, used, most)
    for A in gradient_tiles(a, room, "tile", ia, used, most):
        add_products(K, A, A if same else next(right), outputs, same, room)


# --------------------------------------------------------------------------------------------------- pairs of positions


def read_products(a: LayerCapture, b: LayerCapture, rows: slice, columns: slice) -> Tensor:
    """Inner products <h, h'> of some examples of two batches, "n s m t"."""
    p, q = a.h[rows], b.h[columns]
    if a.kind == "lookup":
        return ((p[:, :, None, None] == q) & (p >= 0)[:, :, None, None]).to(a.g.dtype)
    return (p.flatten(0, 1) @ q.flatten(0, 1).T).view(*p.shape[:2], *q.shape[:2])


def _positions(a: LayerCapture, b: LayerCapture) -> Iterator[tuple[slice, slice]]:
    """Pairs of blocks of positions of whole examples, only on and below the diagonal if both batches are the same."""
    (n, s), (m, t) = a.g.shape[1:3], b.g.shape[1:3]
    parts = min(PARTS, max(1, n * s // SQUARE)) if b is a else max(1, n * s // ROWS)
    for rows, columns in _below(n, m, math.ceil(n / parts), b is a):
        yield slice(rows.start * s, rows.stop * s), slice(columns.start * t, columns.stop * t)


def add_signal_products(S: Tensor, a: LayerCapture, b: LayerCapture) -> None:
    """Add inner products <g, g'> of all pairs of positions to S "... (n s) (m t)", which has the precision of g."""
    A, B = (g.transpose(0, 1).reshape(1, len(g[0]), -1) if S.dim() == 2 and g.shape[2] == 1 else g.reshape(len(g), -1, g.shape[3])
            for g in (a.g, b.g))
    B = A if b is a else B
    for rows, columns in _positions(a, b):
        if S.dim() == 3:
            S[:, rows, columns].baddbmm_(A[:, rows], B[:, columns].mT)
            continue
        for p, q in zip(A, B, strict=True):
            S[rows, columns].addmm_(p[rows], q[columns].T)


def add_pairs(K: Tensor, S: Tensor, a: LayerCapture, b: LayerCapture, weight: bool, bias: bool) -> None:
    """Add the sum over pairs of positions of S = <g, g'> times <h, h'> (+ 1 for a bias) to K; S "... (n s) (m t)"."""
    s, t = a.g.shape[2], b.g.shape[2]
    for pair in _positions(a, b):
        rows, columns = (slice(p.start // each, p.stop // each) for p, each in zip(pair, (s, t), strict=True))
        products = S[(..., *pair)]
        if weight:
            read = read_products(a, b, rows, columns).flatten(2).flatten(0, 1)
            products = products * (read.add_(1) if bias else read)
        K[..., rows, columns] += products.unflatten(-1, (-1, t)).sum(-1).unflatten(-2, (-1, s)).sum(-2) if s * t > 1 else products


def add_full_pairs(K: Tensor, a: LayerCapture, b: LayerCapture, bias: bool, room: Scratch) -> None:
    """Add the kernel of all pairs of outputs to K: <h, h'> is multiplied by g', and the result by g."""
    (v, n, s, d), (w, m, t) = a.g.shape, b.g.shape[:3]
    if s == t == 1:
        hh = read_products(a, b, slice(0, n), slice(0, m))[:, 0, :, 0]
        add_products(K, a.g[:, :, 0], b.g[:, :, 0], "full", b is a, room, hh + 1 if bias else hh)
        return
    whole = a.g.new_zeros(v, n, w, m)
    ga, gb = a.g.contiguous(), b.g.contiguous()
    for rows in steps(n, examples_at_once(n, w * m * s * d)):
        columns = slice(0, rows.stop if b is a else m)
        width = columns.stop
        read = read_products(a, b, rows, columns)
        read = (read + 1 if bias else read).view(-1, width, t).transpose(0, 1)  # m, (n s), t
        moved = room.take("moved", ga, w, width, (rows.stop - rows.start) * s, d)
        for k in range(w):
            torch.bmm(read, gb[k, columns], out=moved[k])
        moved = moved.view(w * width, rows.stop - rows.start, s * d)  # (w m) n (s o)
        left = ga[:, rows].flatten(2).transpose(0, 1)  # n v (s o)
        whole[:, rows, :, columns] = torch.bmm(left, moved.permute(1, 2, 0)).view(-1, v, w, width).transpose(0, 1)
        if b is a:
            whole[:, :rows.start, :, rows] = whole[:, rows, :, :rows.start].permute(2, 3, 0, 1)
    K += whole


# ----------------------------------------------------------------------------------------------------- pooled read-outs


def multiples(g: Tensor, base: Tensor) -> Tensor | None:
    """c "v d_out" with g "v n s d_out" = c base up to rounding, or None. There is one before a pooled linear read-out, where the
    gradients of all outputs in a unit differ by a factor only; outputs and examples then separate."""
    size = base.square().sum((0, 1))
    c = torch.stack([(k * base).sum((0, 1)) for k in g]) / torch.where(size > 0, size, 1.0)
    return c if are_multiples(g, c, base) else None


def are_multiples(g: Tensor, c: Tensor, base: Tensor) -> bool:
    """Return whether each signal g[k] is c[k] times a common base, up to rounding."""
    return all((k - ck * base).norm() <= 16 * torch.finfo(g.dtype).eps * k.norm() for k, ck in zip(g, c, strict=True))


def add_multiples(K: Tensor, c: Tensor, a: LayerCapture, b: LayerCapture, bias: bool, room: Scratch) -> None:
    """Add sum_o c_vo c_wo <gradient in row o, gradient in row o> to K "v n w m", where a and b hold the base."""
    n, m, d_in = a.g.shape[1], b.g.shape[1], a.W.shape[1]
    start, most = 0, max(n, m, n * m // d_in)  # neither a tile nor P is larger than a tile should be
    right = gradient_tiles(b, room, "other tile", examples=most)
    ba, bb = bias_gradients(a)[0], bias_gradients(b)[0]
    for A in gradient_tiles(a, room, examples=most):
        B = A if b is a else next(right)
        rows = slice(start, start + A.shape[2] // d_in)
        start = rows.stop
        P = torch.bmm(A.view(n, -1, d_in).transpose(0, 1), B.view(m, -1, d_in).permute(1, 2, 0))  # o n m
        if bias:
            P += ba[:, rows].T[:, :, None] * bb[:, rows].T[:, None, :]
        weights = (c[:, None, rows] * c[None, :, rows]).flatten(0, 1)  # (v w) o
        K += (weights @ P.flatten(1)).view(len(c), len(c), n, m).transpose(1, 2)


# ----------------------------------------------------------------------------------------------------- sums over cotangents


class Sum:
    """The kernel K of one map between two batches; it is complete after ``close``. The cotangents of a trace come in blocks,
    those of other kernels all at once."""

    def __init__(self, K: Tensor, outputs: Form, weight: bool, bias: bool, v: int, room: Scratch) -> None:
        self.K, self.outputs, self.weight, self.bias, self.v, self.room = K, outputs, weight, bias, v, room
        self.S: Tensor | None = None  # <g, g'> of all pairs of positions, summed over cotangents; multiplied by <h, h'> once
        self.ends: tuple[LayerCapture, LayerCapture] | None = None
        self.pooled: tuple[LayerCapture, LayerCapture, Tensor] | None = None  # a first cotangent, and sum_v c_vo^2 of the others
        self.looked = False  # is it known whether cotangents are multiples of the first?

    def add(self, a: LayerCapture, b: LayerCapture) -> None:
        if self.outputs == "diagonal" and self._add_live(a, b):
            return
        z = Size(a.kind, a.g.shape[1], b.g.shape[1], a.g.shape[2], b.g.shape[2], self.v, *widths(a.kind, a.W.shape), b is a)
        way = cheapest(z, self.outputs) if self.weight else "features"
        if self.weight and a.kind == "dense" and (way == "gradients" or self.outputs == "full") and self._add_pooled(a, b):
            return
        if way != "pairs":
            self._add_gradients(a, b)
        elif self.outputs == "full":
            add_full_pairs(self.K, a, b, self.bias, self.room)
        else:
            self._add_pairs(a, b)
            if self.outputs == "diagonal":  # all cotangents are there
                self.close()

    def _add_live(self, a: LayerCapture, b: LayerCapture) -> bool:
        """Add each output from its live positions (those up to its token, say); False if all positions are live."""
        if a.kind not in ("dense", "lookup") or not self.weight or a.g.shape[2] == 1:
            return False
        live = [live_positions(c) for c in ((a,) if b is a else (a, b))]
        if all(bool(positions.all()) for positions in live):
            return False
        for k, K in enumerate(self.K):
            left, *right = (at_positions(c, k, positions[k]) for c, positions in zip((a, b), live, strict=False))
            output = Sum(K, "trace", self.weight, self.bias, 1, self.room)
            output.add(left, right[0] if right else left)
            output.close()
        return True

    def _add_pooled(self, a: LayerCapture, b: LayerCapture) -> bool:
        """Add cotangents that are multiples of one, or keep them for ``close``; False if they are no multiples."""
        if self.outputs == "full" and len(a.g) > 1 and a.g.shape[2] > 1:
            base = replace(a, g=a.g[:1]), replace(b, g=b.g[:1])
            c = multiples(a.g, a.g[0])
            if c is None or (b is not a and not are_multiples(b.g, c, b.g[0])):
                return False
            add_multiples(self.K, c, base[0], base[0] if b is a else base[1], self.bias, self.room)
            return True
        if self.outputs != "trace" or len(a.g) > 1 or (self.looked and self.pooled is None):
            return False
        if self.pooled is None:
            self.pooled, self.looked = (a, b, torch.ones_like(a.g[0, 0, 0])), True
            return True
        first, second, weights = self.pooled
        c = multiples(a.g, first.g[0]) if a.g.shape == first.g.shape else None
        if c is None or (b is not a and (b.g.shape != second.g.shape or not are_multiples(b.g, c, second.g[0]))):
            self._close_pooled()
            return False
        self.pooled = (first, second, weights + c[0].square())
        return True

    def _close_pooled(self) -> None:
        """Add the pooled signals, which are multiples of each other, as one gradient."""
        if self.pooled is not None:
            first, second, weights = self.pooled
            self.pooled = None
            a = replace(first, g=first.g * weights.sqrt())
            self._add_gradients(a, a if second is first else replace(second, g=second.g * weights.sqrt()))

    def _add_gradients(self, a: LayerCapture, b: LayerCapture) -> None:
        """Add the kernel of two captures by per-example gradients of weight and bias."""
        if self.weight and self.outputs == "diagonal":  # each output is a trace of its own: larger tiles
            for k, K in enumerate(self.K):
                left = replace(a, g=a.g[k:k + 1])
                add_gradients(K, left, left if b is a else replace(b, g=b.g[k:k + 1]), "trace", self.room)
        elif self.weight:
            add_gradients(self.K, a, b, self.outputs, self.room)
        if self.bias:
            A = bias_gradients(a)
            add_products(self.K, A, A if b is a else bias_gradients(b), self.outputs, b is a, self.room)

    def _add_pairs(self, a: LayerCapture, b: LayerCapture) -> None:
        """Add the products of signals of all pairs of positions; inputs are multiplied at the end."""
        shape = (a.g.shape[1] * a.g.shape[2], b.g.shape[1] * b.g.shape[2])
        if self.S is not None and self.S.shape[-2:] != shape:  # positions that were silent so far have gradients
            self.close()
        if self.S is None:
            self.S = a.g.new_zeros(*(() if self.outputs == "trace" else a.g.shape[:1]), *shape)
            ends = [replace(c, g=c.g.new_empty(0, *c.g.shape[1:])) for c in (a, b)]
            self.ends = (ends[0], ends[0] if b is a else ends[1])
        add_signal_products(self.S, a, b)

    def close(self) -> None:
        """Add what is still pooled or summed up by pairs to the kernel."""
        self._close_pooled()
        if self.S is not None and self.ends is not None:
            add_pairs(self.K, self.S, *self.ends, self.weight, self.bias)
        self.S = self.ends = None


# --------------------------------------------------------------------------------------------------- shared parameters
# The kernel of a parameter that is several maps (a vocabulary's matrix that reads tokens and writes logits), without its
# gradients: of sums over positions of outer products a b^T, <A, A'> is the sum over pairs of positions of <a, a'> <b, b'>.


def shared_gradients(network: Network, u: Unit, a: Mapping[str, LayerCapture]) -> Tensor:
    """Gradients "v n p" of a parameter that is several maps, in the parameter's own layout."""
    added: Tensor | None = None
    for k in u.maps:
        J = gradients(a[k])
        added = J.new_zeros(*J.shape[:2], network.state[u.parameter].numel()) if added is None else added
        added.index_add_(2, network.survey.maps[k].index, J)
    assert added is not None
    return added


def by_pairs(network: Network, u: Unit, examples: int, outputs: Form) -> bool:
    """Is a shared parameter contracted over pairs of positions? It is if the gradients of all examples are too many numbers. The
    size of a chunk does not matter, because smaller chunks must not take more memory."""
    parameter, maps = network.state[u.parameter], network.survey.maps
    whole = all(maps[k].kind in ("dense", "lookup") and maps[k].entries == parameter.numel() for k in u.maps)
    return outputs != "full" and parameter.dim() == 2 and whole and examples * parameter.numel() > MOST


def _factors(c: LayerCapture, parameter: Tensor) -> tuple[Tensor, Tensor] | None:
    """The factors "v n s d" (indices "v n s" of a lookup) along the rows and the columns of the parameter; None if the map's
    matrix is neither the parameter nor its transpose."""
    W, g, h = c.W, c.g, c.h.expand(len(c.g), *c.h.shape)
    if W.data_ptr() != parameter.data_ptr():
        return None
    if W.shape == parameter.shape and W.stride() == parameter.stride():
        return g, h
    return (h, g) if W.T.shape == parameter.shape and W.T.stride() == parameter.stride() else None


def _products(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """Inner products of two factors at all pairs of positions; an index stands for a unit vector, -1 for zero."""
    if a.dim() == 2 and b.dim() == 2:
        return a @ b.T
    if a.dim() == 1 and b.dim() == 1:
        return ((a[:, None] == b) & (a >= 0)[:, None]).to(like)
    if a.dim() == 1:
        return _products(b, a, like).T
    return a[:, b.clamp(min=0)] * (b >= 0).to(a)


def add_shared(K: Tensor, maps: Sequence[str], a: Mapping[str, LayerCapture], b: Mapping[str, LayerCapture], parameter: Tensor,
               outputs: Form) -> bool:
    """Add the kernel of a parameter that is these maps to K "n m" or "v n m"; False if a map is only a part of it."""
    left, right = ([_factors(c[k], parameter) for k in maps] for c in (a, b))
    pairs = [(p, q) for p in left for q in right if p is not None and q is not None]
    if len(pairs) < len(maps) ** 2:
        return False
    g, (n, m) = a[maps[0]].g, (c[maps[0]].g.shape[1] for c in (a, b))
    for p, q in pairs:
        s, t = p[0].shape[2], q[0].shape[2]
        for rows in steps(n, max(1, NUMBERS // (s * m * t))):
            for i in range(len(g)):
                first, second = (_products(x[i, rows].flatten(0, 1), y[i].flatten(0, 1), g) for x, y in zip(p, q, strict=True))
                summed = (first * second).unflatten(1, (m, t)).sum(2).unflatten(0, (-1, s)).sum(1)
                (K if outputs == "trace" else K[i])[rows] += summed.to(K.dtype)
    return True


# -------------------------------------------------------------------------------------------------------- units and jobs


@dataclass(frozen=True)
class Unit:
    """Unit of one contraction: a map's matrix with its bias, several maps of one parameter, or a parameter that has no
    map and is differentiated one example at a time."""

    module: str
    maps: tuple[str, ...] = ()
    weight: bool = True
    bias: bool = False
    parameter: str = ""  # of a unit that is not one map


def units_of(model: nn.Module, survey: Survey) -> list[Unit]:
    """All trainable parameters, each in one unit; a shared one belongs to the first module that has it."""
    units: dict[tuple[str, str], Unit] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad or not p.is_floating_point():
            continue
        module = name.rpartition(".")[0]
        maps = survey.structured.get(name, ())
        if maps and _partition([survey.maps[k] for k in maps], p.numel()):
            for k in maps:
                units[module, k] = Unit(module, (k,), bias=(module, k) in units)
        elif maps:  # their gradients are added before the product
            units[module, name] = Unit(module, maps, parameter=name)
        elif name in survey.biases:
            for k in survey.biases[name]:
                known = units.get((module, k))
                units[module, k] = Unit(module, (k,), weight=known is not None and known.weight, bias=True)
        else:
            units[module, name] = Unit(module, parameter=name)
    return list(units.values())


def _partition(maps: Sequence[MapInfo], entries: int) -> bool:
    """Do maps hold every entry of their parameter once? Two that share some and leave others out can be as large as it."""
    if sum(info.entries for info in maps) != entries or len(maps) == 1:
        return len(maps) == 1 and maps[0].entries == entries
    held = torch.zeros(entries, dtype=torch.bool, device=maps[0].index.device)
    for info in maps:
        held[info.index] = True
    return bool(held.all())


def forward_operations(survey: Survey) -> int:
    """Operations of a forward pass of one example through all maps: none in a lookup, one for each number in a norm."""
    number = 0
    for info in survey.maps.values():
        d_in, _, groups = widths(info.kind, info.shape)
        number += 0 if info.kind == "lookup" else 2 * info.width * (d_in // groups)
    return number


class Line(NamedTuple):
    """The share of one unit in a plan."""

    module: str
    unit: str
    way: str
    positions: int
    operations: float


@dataclass(frozen=True)
class KernelPlan:
    """How a kernel will be computed. ``print(plan)`` shows it."""

    examples: tuple[int, int]
    outputs: int
    kind: Form
    chunk: int  # examples at a time on each side
    block: int  # cotangents at a time
    passes: int  # forward passes of a chunk
    backward: int  # backward passes of a chunk, to the layers' outputs
    bytes: int  # at most, beyond the kernels themselves
    result: int  # bytes of the kernels
    operations: float
    lines: tuple[Line, ...]

    def __str__(self) -> str:
        n, m = self.examples
        rows = [("layer", "contraction", "positions", "GFLOP"),
                *((u.unit, u.way, str(u.positions), f"{u.operations / 1e9:.3g}") for u in self.lines)]
        return "\n".join([
            f"{self.kind} kernel of {n} x {m} examples, {self.outputs} outputs: {self.operations / 1e9:.3g} GFLOP, "
            f"{show_bytes(self.bytes)} beside {show_bytes(self.result)} of kernels",
            f"{self.passes} forward and {self.backward} backward passes of {self.chunk} examples, to the layers' outputs; what "
            f"{self.block} of them ask is held at a time", table(rows)])


@dataclass(frozen=True)
class Job:
    """A kernel to be computed: of which units, through which cotangents, between how many examples."""

    network: Network
    units: Sequence[Unit]
    cotangents: RowCotangents
    v: int  # cotangents for each example
    outputs: Form
    n: int
    m: int
    same: bool = True  # are both sides the same examples?
    per_layer: bool = True
    chunk: int | None = None  # at most so many examples at a time
    first_outputs: Tensor | None = None  # of the first examples, when an earlier call made the survey

    @property
    def maps(self) -> list[str]:
        """Names of the maps."""
        return list(dict.fromkeys(k for u in self.units for k in u.maps))

    @property
    def loose(self) -> list[str]:
        """Parameters without a map."""
        return [u.parameter for u in self.units if not u.maps]

    @property
    def modules(self) -> list[str]:
        """Names of the modules."""
        return list(dict.fromkeys(u.module for u in self.units))

    @property
    def least(self) -> int:
        """Bytes of the smallest piece of work: a pair of examples."""
        return self.bytes(1, 1, False)

    def plan(self, memory: int) -> KernelPlan:
        """Plan with the largest chunks that fit; an error says the least memory that would do."""
        n, m, v, modules = self.n, self.m, self.v, len(self.modules)
        result = (modules if self.per_layer else 1) * n * m * {"trace": 8, "diagonal": 8 * v}.get(
            self.outputs, v * v * self.network.dtype.itemsize)
        if self.least > memory:
            least = show_bytes(self.least)
            raise MemoryBudgetError(
                f"memory={show_bytes(memory)} cannot hold one pair of examples of {modules} layers ({least}) beside "
                f"their kernels. The smallest that works here is memory='{least}'; "
                f"fewer examples (Probe(kernel_examples=...)), fewer outputs (output=...) or layers (layers=...) need less.")

        def need(c: int) -> int:
            return self.bytes(c, min(c, m), self.same and c >= n)

        c = min(max(n, m), self.chunk or max(n, m))
        while c > 1 and need(c) > memory:
            c = min(c - 1, math.ceil(c / 1.25))
        rows, columns = math.ceil(n / c), math.ceil(m / c)
        passes = rows * (rows + 1) // 2 if self.same else rows * (1 + columns)
        backward = v * (rows ** 2 if self.same else 2 * rows * columns)  # both sides of every pair of chunks
        lines = tuple(self._line(u) for u in self.units)
        operations = c * (passes + backward) * forward_operations(self.network.survey) + sum(u.operations for u in lines)
        block, more = self._block(c if self.same and c >= n else c + min(c, m), memory - need(c))
        return KernelPlan((n, m), v, self.outputs, c, block, passes, backward, need(c) + more, result, operations, lines)

    def _block(self, sides: int, room: int) -> tuple[int, int]:
        """(cotangents at a time, the bytes that this takes beyond those of one). A trace takes one after another, but for maps
        of one position and few examples, where the calls of functions cost more than the products."""
        if self.outputs != "trace":
            return self.v, 0
        maps = [self.network.survey.maps[k] for k in self.maps]
        more = 2 * (self.v - 1) * sides * sum(info.width for info in maps) * self.network.dtype.itemsize
        together = all(info.positions == 1 and info.kind == "dense" for info in maps) and more <= min(room, TOGETHER)
        return (self.v, more) if together else (1, 0)

    def _line(self, u: Unit) -> Line:
        """Cost and way of contraction of one unit."""
        name, maps = u.parameter or u.maps[0], self.network.survey.maps
        v2 = self.v * self.v if self.outputs == "full" else self.v
        if u.parameter:
            s = max((positions(maps[k]) for k in u.maps), default=1)
            return Line(u.module, name, "shared gradients" if u.maps else "one example at a time", s,
                        (0.5 if self.same else 1) * 2 * v2 * self.n * self.m * self.network.state[u.parameter].numel())
        z = size_of_map(maps[u.maps[0]], self.n, self.m, self.v, self.same)
        way = cheapest(z, self.outputs) if u.weight else "features"
        return Line(u.module, name, way, z.s,
                    costs(z, self.outputs)[way][0] if u.weight else 2 * v2 * self.n * self.m * z.d_out)

    def bytes(self, n: int, m: int, same: bool) -> int:
        """Bytes held at once for a pair of chunks: graphs, captures, sums over pairs, a tile."""
        survey, state = self.network.survey, self.network.state
        block, sides = 1 if self.outputs == "trace" else self.v, n if same else n + m
        asked = sum(survey.maps[k].width for k in self.maps)
        read = sum(survey.maps[k].unfolded for k in self.maps)
        # one more cotangent is on its way, or the first one of a trace (see Sum.pooled); a quarter passes through backward passes
        held = sides * (survey.graph + read + (block + 1) * asked) * 5 // 4
        held += sides * survey.graph // 4 if self.loose else 0  # gradients of examples side by side: see Chunk.gradients
        moment: dict[str, int] = {}  # contraction -> what it holds while it runs, and keeps for the next map (see Scratch)
        sums = 0
        for u in self.units:
            if u.parameter:
                number = (block if u.maps else self.v) * state[u.parameter].numel()
                held += 0 if u.maps else sides * number
                pairs = u.maps and by_pairs(self.network, u, max(self.n, self.m), self.outputs)
                moment["shared"] = max(moment.get("shared", 0), 3 * NUMBERS if pairs else 2 * sides * number)
            elif u.weight:
                z = size_of_map(survey.maps[u.maps[0]], n, m, self.v, same)
                way = cheapest(z, self.outputs)
                here = costs(z, self.outputs)[way][1]
                if way == "pairs" and self.outputs == "trace":  # half of it is a sum that stays until the last cotangent
                    here //= 2
                    sums += here
                moment[way] = max(moment.get(way, 0), here)
                if self.outputs == "full" and z.kind == "dense" and z.s > 1:  # before a pooled read-out
                    moment["gradients"] = max(moment.get("gradients", 0), costs(z, self.outputs)["gradients"][1])
        return self.network.dtype.itemsize * (held + sums + sum(moment.values()))


def unit_gradients(network: Network, u: Unit, captures: Mapping[str, LayerCapture], whole: Mapping[str, Tensor], output: int,
                   room: Scratch) -> Iterator[Tensor]:
    """Yield per-example gradients "n p" of one output in a unit, some parameters at a time."""
    if u.parameter:
        yield shared_gradients(network, u, captures)[0] if u.maps else whole[u.parameter][output]
        return
    c = captures[u.maps[0]]
    if u.bias:
        yield bias_gradients(c)[0]
    if u.weight:
        for A in gradient_tiles(c, room):
            yield A[0]


class KernelBlock:
    """The kernels of all units of a job between two chunks."""

    def __init__(self, job: Job, out: Mapping[str, Tensor]) -> None:
        self.job, self.out, self.room = job, out, Scratch()
        self.sums = {u: Sum(out[u.module], job.outputs, u.weight, u.bias, job.v, self.room) for u in job.units
                     if u.maps and not u.parameter}

    def add(self, a: Mapping[str, LayerCapture], b: Mapping[str, LayerCapture]) -> None:
        """Add the kernel of one block of cotangents."""
        job, network = self.job, self.job.network
        for u in job.units:
            if u in self.sums:
                self.sums[u].add(a[u.maps[0]], b[u.maps[0]])
            elif u.maps and not (by_pairs(network, u, max(job.n, job.m), job.outputs) and add_shared(
                    self.out[u.module], u.maps, a, b, network.state[u.parameter], job.outputs)):
                A = shared_gradients(network, u, a)
                self._add_gradients(u, A, A if b is a else shared_gradients(network, u, b))

    def add_whole(self, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
        """Add the parameters without a map from their whole gradients, all cotangents at once."""
        for u in self.job.units:
            if not u.maps:
                self._add_gradients(u, a[u.parameter], b[u.parameter])

    def _add_gradients(self, u: Unit, A: Tensor, B: Tensor) -> None:
        """Add the products of two sets of per-example gradients."""
        add_products(self.out[u.module], A, B, self.job.outputs, A is B, self.room)

    def close(self) -> None:
        """Finish the sums of all units."""
        for s in self.sums.values():
            s.close()
