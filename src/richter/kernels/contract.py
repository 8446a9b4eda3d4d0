"""Products of per-example gradients between two batches, added up without forming more of them than a tile.

A kernel is "n m" (trace), "v n m" (diagonal) or "v n w m" (full). Where both batches are one, what is above the diagonal
(of examples; of tiles in a full kernel) may be wrong until ``mirror`` fills it from what is below. Dot products are taken in
the model's precision; sums over outputs, tiles and parameters are added up in the dtype of the kernel.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from richter.core import MemoryBudgetError, show_bytes
from richter.core.values import table
from richter.instrument.capture import State
from richter.instrument.stream import LayerCapture, steps
from richter.instrument.survey import MapInfo, Survey

# ---------------------------------------------------------------------------------------------------------- operations
# How many operations each contraction of a kernel takes, and how large its tiles are; the cheapest one is chosen by counting.

Outputs = Literal["trace", "diagonal", "full"]
Way = Literal["pairs", "gradients", "features"]
OUTPUTS = ("trace", "diagonal", "full")
ROWS = 1024  # of a tile of products
SQUARE, PARTS = 96, 6  # rows of a block of a symmetric product of short rows, and blocks at most: more gain less than they cost
SHORT = 2  # the short products of pairs of positions and outputs take so many times as long as others of as many operations
NUMBERS = 2 ** 21  # in a tile of gradients: it should stay in the cache between being made and being used


@dataclass(frozen=True)
class Size:
    """What the cost of one map's kernel depends on: n examples of s positions against m of t, v cotangents."""

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
        return self.d_out * (1 if self.kind == "diagonal" else self.d_in // self.groups)


def costs(z: Size, outputs: Outputs) -> dict[Way, tuple[float, int]]:
    """For each exact contraction of one map: (operations, numbers held while it runs)."""
    half, sides = (0.5, z.n * z.s) if z.same else (1.0, z.n * z.s + z.m * z.t)
    v2 = z.v * z.v if outputs == "full" else z.v
    width = min(z.d_in, sides) * z.d_out if z.kind == "lookup" else z.p
    making = 2 * z.v * sides * (z.d_out if z.kind in ("lookup", "diagonal") else z.p)
    by_gradients = making + half * 2 * v2 * z.n * z.m * width
    tile = 2 * min(max(NUMBERS, (z.v if outputs == "full" else 1) * max(z.n, z.m) * 8 * max(1, width // z.d_out)),
                   (z.v if outputs == "full" else 1) * max(z.n, z.m) * width)
    product = _product(z, outputs)
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


def _product(z: Size, outputs: Outputs) -> int:
    """Numbers of the largest product that ``add_products`` makes at a time."""
    if outputs == "full":
        return min(tile_rows(z.v * z.n), z.v * z.n) * min(max(4 * ROWS, z.m), z.v * z.m)
    return (z.v if outputs == "diagonal" else 1) * min(tile_rows(z.n) if z.same else ROWS, z.n) * min(max(4 * ROWS, z.n), z.m)


def widths(kind: str, shape: Sequence[int]) -> tuple[int, int, int]:
    """(d_in, d_out, groups) of a map with a matrix of this shape."""
    if kind == "grouped":
        return shape[0] * shape[2], shape[0] * shape[1], shape[0]
    return (1 if kind == "diagonal" else shape[-1]), shape[0], 1


@functools.lru_cache(maxsize=1024)
def cheapest(z: Size, outputs: Outputs) -> Way:
    found = costs(z, outputs)
    short = SHORT if outputs == "full" and z.s * z.t > 1 else 1
    return min(found, key=lambda way: found[way][0] * (short if way == "pairs" else 1))


def examples_at_once(n: int, each: int) -> int:
    """So many examples at a time when each of them takes ``each`` numbers."""
    return min(n, max(1, NUMBERS // each))


def tile_rows(n: int) -> int:
    """Rows of a tile of a symmetric product of n rows: few enough that little of it is computed twice, and enough for a product
    at full speed."""
    return min(ROWS, max(64, n // 5))


# ------------------------------------------------------------------------------------------------------------ contract

def size_of(a: LayerCapture, b: LayerCapture, v: int) -> Size:
    return Size(a.kind, a.g.shape[1], b.g.shape[1], a.g.shape[2], b.g.shape[2], v, *widths(a.kind, a.W.shape), b is a)


# ------------------------------------------------------------------------------------------------------------ tiles


class Room:
    """Memory for tiles, taken again and again: to touch fresh memory costs more than to fill it with a product."""

    def __init__(self) -> None:
        self.kept: dict[str, Tensor] = {}

    def take(self, what: str, like: Tensor, *shape: int) -> Tensor:
        """An empty tensor; it lies where the last one of that name did. What grows should be asked for from its largest on."""
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
    """Pairs of blocks of rows and columns; on and below the diagonal where both sides are one."""
    for rows in steps(n, size):
        for columns in [slice(0, rows.stop)] if same else steps(m, 4 * ROWS):
            yield rows, columns


def mirror(K: Tensor, outputs: Outputs) -> Tensor:
    """Fill what is above the diagonal of a symmetric kernel from what is below."""
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


def add_products(K: Tensor, A: Tensor, B: Tensor, outputs: Outputs, same: bool, room: Room,
                 scale: Tensor | None = None) -> None:
    """K += products of features A "v n p" with B "w m p"; a full kernel's times ``scale`` "n m" where it is given."""
    if outputs == "full":
        left, right = tiles(*A.shape[:2]), tiles(*B.shape[:2])
        for i, (v, rows) in reversed(list(enumerate(left))):  # the longest strip first: see Room
            if rows == slice(0, A.shape[1]):  # whole outputs: one long product instead of a tile after the other
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


# ------------------------------------------------------------------------------------------------------ positions


def places(c: LayerCapture) -> Tensor:
    """The positions at which each cotangent asks something of some example, "v s"."""
    return (c.g != 0).flatten(3).any(3).any(1)


def at_places(c: LayerCapture, k: int, live: Tensor) -> LayerCapture:
    """One cotangent at some of the positions; one of them at least."""
    chosen = live.nonzero()[:, 0] if bool(live.any()) else torch.zeros(1, dtype=torch.int64, device=live.device)
    return replace(c, h=c.h[:, chosen], g=c.g[k:k + 1, :, chosen])


# ------------------------------------------------------------------------------------------------------ gradients


def bias_gradients(c: LayerCapture) -> Tensor:
    """Per-example gradients in the bias, "v n p"."""
    return (c.g[:, :, 0] if c.g.shape[2] == 1 else c.g.sum(2)).flatten(2)


def gradient_tiles(c: LayerCapture, room: Room, what: str = "tile", index: Tensor | None = None, rows: int = 0,
                   examples: int = 0) -> Iterator[Tensor]:
    """Per-example gradients in the map's matrix, "v n p", some rows of the matrix at a time: so many that a tile of (at
    least) ``examples`` examples has its size. A lookup may be read through an ``index`` into so many ``rows``. Large tiles lie
    in the ``room``, under the name ``what``, and are gone when the next one is asked for."""
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
    return torch.cat([J.clone() for J in gradient_tiles(c, Room())], 2)


def _compact(a: LayerCapture, b: LayerCapture) -> tuple[Tensor | None, Tensor | None, int]:
    """Indices of a lookup among those that occur: a vocabulary is mostly not read."""
    if a.kind != "lookup":
        return None, None, 0
    used, place = torch.unique(torch.cat([a.h.flatten(), b.h.flatten()]), return_inverse=True)
    return place[:a.h.numel()].view(a.h.shape), place[a.h.numel():].view(b.h.shape), len(used)


def add_gradients(K: Tensor, a: LayerCapture, b: LayerCapture, outputs: Outputs, room: Room) -> None:
    """K += the kernel of a map's matrix, by per-example gradients, a tile at a time."""
    same = b is a
    ia, ib, used = _compact(a, b)
    most = max(a.g.shape[1], b.g.shape[1])
    right = gradient_tiles(b, room, "other tile", ib, used, most)
    for A in gradient_tiles(a, room, "tile", ia, used, most):
        add_products(K, A, A if same else next(right), outputs, same, room)


# ------------------------------------------------------------------------------------------------ pairs of positions


def read_products(a: LayerCapture, b: LayerCapture, rows: slice, columns: slice) -> Tensor:
    """Inner products of what some examples of two batches read, "n s m t"."""
    p, q = a.h[rows], b.h[columns]
    if a.kind == "lookup":
        return ((p[:, :, None, None] == q) & (p >= 0)[:, :, None, None]).to(a.g.dtype)
    return (p.flatten(0, 1) @ q.flatten(0, 1).T).view(*p.shape[:2], *q.shape[:2])


def add_asked(S: Tensor, a: LayerCapture, b: LayerCapture) -> None:
    """S += inner products of what is asked of two batches, between all positions; S has the precision of g."""
    A = a.g.reshape(len(a.g), -1, a.g.shape[3])
    B = A if b is a else b.g.reshape(len(b.g), -1, b.g.shape[3])
    for rows, columns in _positions(a, b):
        if S.dim() == 3:
            S[:, rows, columns].baddbmm_(A[:, rows], B[:, columns].mT)
            continue
        for p, q in zip(A, B, strict=True):
            S[rows, columns].addmm_(p[rows], q[columns].T)


def _positions(a: LayerCapture, b: LayerCapture) -> Iterator[tuple[slice, slice]]:
    """Pairs of blocks of positions of whole examples; on and below the diagonal where both batches are one."""
    (n, s), (m, t) = a.g.shape[1:3], b.g.shape[1:3]
    parts = min(PARTS, max(1, n * s // SQUARE)) if b is a else max(1, n * s // ROWS)
    for rows, columns in _below(n, m, math.ceil(n / parts), b is a):
        yield slice(rows.start * s, rows.stop * s), slice(columns.start * t, columns.stop * t)


def add_pairs(K: Tensor, S: Tensor, a: LayerCapture, b: LayerCapture, weight: bool, bias: bool) -> None:
    """K += sum over pairs of positions of S = <g, g'> times <h, h'> (+ 1 for a bias); S "... (n s) (m t)"."""
    s, t = a.g.shape[2], b.g.shape[2]
    for places in _positions(a, b):
        rows, columns = (slice(p.start // each, p.stop // each) for p, each in zip(places, (s, t), strict=True))
        asked = S[(..., *places)]
        if weight:
            read = read_products(a, b, rows, columns).flatten(2).flatten(0, 1)
            asked = asked * (read.add_(1) if bias else read)
        K[..., rows, columns] += asked.unflatten(-1, (-1, t)).sum(-1).unflatten(-2, (-1, s)).sum(-2) if s * t > 1 else asked


def add_full_pairs(K: Tensor, a: LayerCapture, b: LayerCapture, bias: bool, room: Room) -> None:
    """The same for every pair of outputs: <h, h'> is carried over to g', and the result is asked by g."""
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
        mine = ga[:, rows].flatten(2).transpose(0, 1)  # n v (s o)
        whole[:, rows, :, columns] = torch.bmm(mine, moved.permute(1, 2, 0)).view(-1, v, w, width).transpose(0, 1)
        if b is a:
            whole[:, :rows.start, :, rows] = whole[:, rows, :, :rows.start].permute(2, 3, 0, 1)
    K += whole


# ----------------------------------------------------------------------------------------------------- pooled read-outs


def multiples(g: Tensor, base: Tensor) -> Tensor | None:
    """c "v d_out" with g "v n s d_out" = c base, if there is one to rounding. So it is in front of a pooled linear read-out,
    where every output asks the same of a unit, up to its weight: the outputs then leave the product over examples."""
    size = base.square().sum((0, 1))
    c = torch.stack([(k * base).sum((0, 1)) for k in g]) / torch.where(size > 0, size, 1.0)
    return c if are_multiples(g, c, base) else None


def are_multiples(g: Tensor, c: Tensor, base: Tensor) -> bool:
    return all((k - ck * base).norm() <= 16 * torch.finfo(g.dtype).eps * k.norm() for k, ck in zip(g, c, strict=True))


def add_multiples(K: Tensor, c: Tensor, a: LayerCapture, b: LayerCapture, bias: bool, room: Room) -> None:
    """K "v n w m" += sum_o c_vo c_wo <gradient in row o, gradient in row o>, where a and b hold the base."""
    n, m, d_in = a.g.shape[1], b.g.shape[1], a.W.shape[1]
    start, most = 0, max(n, m, n * m // d_in)  # so that neither a tile nor P is larger than a tile should be
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


class Sum:
    """The kernel of one map between two batches in the making: K grows with every block of cotangents that is added, and
    is complete when the sum is closed. Traces come in blocks; the others come whole."""

    def __init__(self, K: Tensor, outputs: Outputs, weight: bool, bias: bool, v: int, room: Room) -> None:
        self.K, self.outputs, self.weight, self.bias, self.v, self.room = K, outputs, weight, bias, v, room
        self.S: Tensor | None = None  # <g, g'> of all pairs of positions, summed over cotangents; multiplied by <h, h'> once
        self.ends: tuple[LayerCapture, LayerCapture] | None = None
        self.pooled: tuple[LayerCapture, LayerCapture, Tensor] | None = None  # a first cotangent, and sum_v c_vo^2 of the others
        self.looked = False  # is it known whether cotangents are multiples of the first?

    def add(self, a: LayerCapture, b: LayerCapture) -> None:
        if self.outputs == "diagonal" and self._add_live(a, b):
            return
        way = cheapest(size_of(a, b, self.v), self.outputs) if self.weight else "features"
        if self.weight and a.kind == "dense" and (way == "gradients" or self.outputs == "full") and self._add_pooled(a, b):
            return
        if way == "pairs":
            if self.outputs == "full":
                add_full_pairs(self.K, a, b, self.bias, self.room)
            else:
                self._add_pairs(a, b)
            if self.outputs == "diagonal":  # it came whole
                self.close()
            return
        self._add_gradients(a, b)

    def _add_live(self, a: LayerCapture, b: LayerCapture) -> bool:
        """Each output by itself, from the positions that it is reached from (those up to its token, say), if some are silent."""
        if a.kind not in ("dense", "lookup") or not self.weight or a.g.shape[2] == 1:
            return False
        reached = [places(c) for c in ((a,) if b is a else (a, b))]
        if all(bool(live.all()) for live in reached):
            return False
        for k, K in enumerate(self.K):
            mine, *others = (at_places(c, k, live[k]) for c, live in zip((a, b), reached, strict=False))
            own = Sum(K, "trace", self.weight, self.bias, 1, self.room)
            own.add(mine, others[0] if others else mine)
            own.close()
        return True

    def _add_pooled(self, a: LayerCapture, b: LayerCapture) -> bool:
        """Put off, or add at once, what is a multiple of one cotangent; False when it is not."""
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
        if self.pooled is not None:
            first, second, weights = self.pooled
            self.pooled = None
            a = replace(first, g=first.g * weights.sqrt())
            self._add_gradients(a, a if second is first else replace(second, g=second.g * weights.sqrt()))

    def _add_gradients(self, a: LayerCapture, b: LayerCapture) -> None:
        if self.weight and self.outputs == "diagonal":  # each output is a trace of its own: larger tiles
            for k, Kc in enumerate(self.K):
                mine = replace(a, g=a.g[k:k + 1])
                add_gradients(Kc, mine, mine if b is a else replace(b, g=b.g[k:k + 1]), "trace", self.room)
        elif self.weight:
            add_gradients(self.K, a, b, self.outputs, self.room)
        if self.bias:
            A = bias_gradients(a)
            add_products(self.K, A, A if b is a else bias_gradients(b), self.outputs, b is a, self.room)

    def _add_pairs(self, a: LayerCapture, b: LayerCapture) -> None:
        shape = (a.g.shape[1] * a.g.shape[2], b.g.shape[1] * b.g.shape[2])
        if self.S is not None and self.S.shape[-2:] != shape:  # positions that were silent so far have spoken
            self.close()
        if self.S is None:
            self.S = a.g.new_zeros(*(() if self.outputs == "trace" else a.g.shape[:1]), *shape)
            ends = [replace(c, g=c.g.new_empty(0, *c.g.shape[1:])) for c in (a, b)]
            self.ends = (ends[0], ends[0] if b is a else ends[1])
        add_asked(self.S, a, b)

    def close(self) -> None:
        self._close_pooled()
        if self.S is not None and self.ends is not None:
            add_pairs(self.K, self.S, *self.ends, self.weight, self.bias)
        self.S = self.ends = None


# -------------------------------------------------------------------------------------------------------------- shared
# Kernels of a parameter that is several maps (a vocabulary's matrix that reads tokens and writes logits), without its gradients:
# of sums over positions of outer products a b^T, <A, A'> is the sum over pairs of positions of <a, a'> <b, b'>.

MOST = 2 ** 25  # numbers of gradients that are formed


def by_pairs(survey: Survey, state: State, maps: tuple[str, ...], parameter: str, examples: int, outputs: Outputs) -> bool:
    """Are pairs of positions multiplied? Where the gradients of all examples, of one cotangent, are too many numbers: of all, and
    not of a chunk, because smaller chunks must not take more room."""
    numbers = state[parameter].numel()
    whole = all(survey.maps[k].kind in ("dense", "lookup") and survey.maps[k].entries == numbers for k in maps)
    return outputs != "full" and state[parameter].dim() == 2 and whole and examples * numbers > MOST


@dataclass(frozen=True)
class Side:
    """One factor of the outer products of one map: what is asked "v n s d", what is read "n s d", or indices "n s"."""

    numbers: Tensor
    asked: bool

    def of(self, v: int, rows: slice) -> Tensor:
        t = self.numbers[v] if self.asked else self.numbers
        return t[rows].flatten(0, 1)


def oriented(c: LayerCapture, parameter: Tensor) -> tuple[Side, Side] | None:
    """The factors along the rows and the columns of the parameter; None if the map's matrix is neither it nor its transpose."""
    g, h, W = Side(c.g, True), Side(c.h, False), c.W
    if W.data_ptr() != parameter.data_ptr():
        return None
    if W.shape == parameter.shape and W.stride() == parameter.stride():
        return g, h
    return (h, g) if W.T.shape == parameter.shape and W.T.stride() == parameter.stride() else None


def _products(a: Tensor, b: Tensor, like: Tensor) -> Tensor:
    """Inner products of two factors at all pairs of positions; an index stands for a unit vector, -1 for nothing."""
    if a.dim() == 2 and b.dim() == 2:
        return a @ b.T
    if a.dim() == 1 and b.dim() == 1:
        return ((a[:, None] == b) & (a >= 0)[:, None]).to(like)
    if a.dim() == 1:
        return _products(b, a, like).T
    return a[:, b.clamp(min=0)] * (b >= 0).to(a)


def add_shared(K: Tensor, maps: tuple[str, ...], a: Mapping[str, LayerCapture], b: Mapping[str, LayerCapture], parameter: Tensor,
               outputs: Outputs) -> bool:
    """K "n m" or "v n m" += the kernel of a parameter that is these maps; False if some of them is only a part of it."""
    left, right = ({k: oriented(c[k], parameter) for k in maps} for c in (a, b))
    n, m, v = a[maps[0]].g.shape[1], b[maps[0]].g.shape[1], len(a[maps[0]].g)
    pairs = [(p, q) for p in left.values() for q in right.values()]
    if any(p is None or q is None for p, q in pairs):
        return False
    for p, q in pairs:
        assert p is not None and q is not None
        s, t = (side[0].numbers.shape[2 if side[0].asked else 1] for side in (p, q))
        for rows in steps(n, max(1, NUMBERS // (s * m * t))):
            for i in range(v):
                first, second = (_products(p[j].of(i, rows), q[j].of(i, slice(0, m)), a[maps[0]].g) for j in range(2))
                summed = (first * second).unflatten(1, (m, t)).sum(2).unflatten(0, (-1, s)).sum(1)
                (K if outputs == "trace" else K[i])[rows] += summed.to(K.dtype)
    return True


# ------------------------------------------------------------------------------------------------------------ planning
# What a kernel will cost before it is computed: which contraction, how many passes, how many operations and bytes.

@dataclass(frozen=True)
class Unit:
    """What one contraction covers: a map's matrix with its bias, several maps of one parameter, or a parameter that has no
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
        if maps and _in_parts([survey.maps[k] for k in maps], p.numel()):
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


def _in_parts(maps: Sequence[MapInfo], entries: int) -> bool:
    """Do maps hold every entry of their parameter once? Two that share some, and leave others out, can be as large as it."""
    if sum(info.entries for info in maps) != entries or len(maps) == 1:
        return len(maps) == 1 and maps[0].entries == entries
    held = torch.zeros(entries, dtype=torch.bool, device=maps[0].index.device)
    for info in maps:
        held[info.index] = True
    return bool(held.all())


@dataclass(frozen=True)
class Line:
    """One unit's share of a plan."""

    module: str
    unit: str
    way: str
    positions: int
    operations: float


@dataclass(frozen=True)
class Plan:
    """How a kernel will be computed. ``print(plan)`` shows it."""

    examples: tuple[int, int]
    outputs: int
    kind: Outputs
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
        rows = [HEAD, *((u.unit, u.way, str(u.positions), f"{u.operations / 1e9:.3g}") for u in self.lines)]
        return "\n".join([
            f"{self.kind} kernel of {n} x {m} examples, {self.outputs} outputs: {self.operations / 1e9:.3g} GFLOP, "
            f"{show_bytes(self.bytes)} beside {show_bytes(self.result)} of kernels",
            f"{self.passes} forward and {self.backward} backward passes of {self.chunk} examples, to the layers' outputs; what "
            f"{self.block} of them ask is held at a time", table(rows)])


HEAD = ("layer", "contraction", "positions", "GFLOP")


def positions(info: MapInfo) -> int:
    """Those that a contraction goes over: the live ones where they are at most half (see Recording.trimmed)."""
    return info.live if info.silent else info.positions


def size(info: MapInfo, n: int, m: int, v: int, same: bool) -> Size:
    s = positions(info)
    return Size(info.kind, n, m, s, s, v, *widths(info.kind, info.shape), same)


def forward_operations(survey: Survey) -> int:
    """Of a forward pass of one example through all maps: a lookup multiplies nothing, a norm each number once."""
    number = 0
    for info in survey.maps.values():
        d_in, _, groups = widths(info.kind, info.shape)
        number += 0 if info.kind == "lookup" else 2 * info.width * (d_in // groups)
    return number


@dataclass(frozen=True)
class Request:
    """A kernel that is asked for: of which units, between how many examples, of how many cotangents."""

    survey: Survey
    units: Sequence[Unit]
    state: State
    n: int
    m: int
    v: int
    outputs: Outputs
    itemsize: int
    per_layer: bool = True
    same: bool = True  # are both sides the same examples?
    chunk: int | None = None  # at most so many examples at a time

    def numbers(self, n: int, m: int, same: bool) -> int:
        """Held at once for a pair of chunks: graphs, what was asked and read, sums over pairs, a tile."""
        return _numbers(self, n, m, 1 if self.outputs == "trace" else self.v, same)


def make_plan(r: Request, memory: int) -> Plan:
    """The largest chunks that fit; an error that says the least that would do."""
    n, m, v = r.n, r.m, r.v
    modules = len({u.module for u in r.units})
    pairs = n * m * {"trace": 1, "diagonal": v, "full": v * v}[r.outputs]
    result = (modules if r.per_layer else 1) * pairs * (r.itemsize if r.outputs == "full" else 8)

    def need(c: int) -> int:
        return r.itemsize * r.numbers(c, min(c, m), r.same and c >= n)

    smallest = least(r)
    if smallest > memory:
        raise MemoryBudgetError(
            f"memory={show_bytes(memory)} cannot hold one pair of examples of {modules} layers ({show_bytes(smallest)}) beside "
            f"their kernels. The smallest that works here is memory='{show_bytes(smallest)}'; "
            f"fewer examples (Probe(kernel=...)), fewer outputs (output=...) or fewer layers (layers=...) need less.")
    c = min(max(n, m), r.chunk or max(n, m))
    while c > 1 and need(c) > memory:
        c = min(c - 1, math.ceil(c / 1.25))
    chunks = (math.ceil(n / c), math.ceil(m / c))
    passes = chunks[0] * (chunks[0] + 1) // 2 if r.same else chunks[0] * (1 + chunks[1])
    backward = v * (chunks[0] ** 2 if r.same else 2 * chunks[0] * chunks[1])  # both sides of every pair of chunks
    lines = tuple(_line(r, u) for u in r.units)
    operations = c * (passes + backward) * forward_operations(r.survey) + sum(u.operations for u in lines)
    block = 1 if r.outputs == "trace" else v
    return Plan((n, m), v, r.outputs, c, block, passes, backward, need(c), result, operations, lines)


def least(r: Request) -> int:
    """Bytes of the smallest piece of work: a pair of examples."""
    return r.itemsize * r.numbers(1, 1, False)


def _line(r: Request, u: Unit) -> Line:
    name = u.parameter or u.maps[0]
    v2 = r.v * r.v if r.outputs == "full" else r.v
    if u.parameter:
        s = max((positions(r.survey.maps[k]) for k in u.maps), default=1)
        return Line(u.module, name, "shared gradients" if u.maps else "one example at a time", s,
                    (0.5 if r.same else 1) * 2 * v2 * r.n * r.m * r.state[u.parameter].numel())
    z = size(r.survey.maps[u.maps[0]], r.n, r.m, r.v, r.same)
    way = cheapest(z, r.outputs) if u.weight else "features"
    return Line(u.module, name, way, z.s, costs(z, r.outputs)[way][0] if u.weight else 2 * v2 * r.n * r.m * z.d_out)


def _numbers(r: Request, n: int, m: int, block: int, same: bool) -> int:
    sides = n if same else n + m
    maps = dict.fromkeys(k for u in r.units for k in u.maps)
    asked = sum(r.survey.maps[k].width for k in maps)
    read = sum(r.survey.maps[k].unfolded for k in maps)
    blocks = block + 1  # one on its way to the others; in a trace, the first one (see Sum.pooled)
    held = sides * (r.survey.graph + read + blocks * asked) * 5 // 4  # a quarter for what passes through a backward pass
    moment: dict[str, int] = {}  # contraction -> what it holds while it runs, and keeps for the next map (see Room)
    sums = 0
    for u in r.units:
        if u.parameter:
            number = (block if u.maps else r.v) * r.state[u.parameter].numel()
            held += 0 if u.maps else sides * number
            pairs = u.maps and by_pairs(r.survey, r.state, u.maps, u.parameter, max(r.n, r.m), r.outputs)
            moment["shared"] = max(moment.get("shared", 0), 3 * NUMBERS if pairs else 2 * sides * number)
        elif u.weight:
            z = size(r.survey.maps[u.maps[0]], n, m, r.v, same)
            way = cheapest(z, r.outputs)
            here = costs(z, r.outputs)[way][1]
            if way == "pairs" and r.outputs == "trace":  # half of it is a sum that stays until the last cotangent
                here //= 2
                sums += here
            moment[way] = max(moment.get(way, 0), here)
            if r.outputs == "full" and z.kind == "dense" and z.s > 1:  # a pooled read-out may be in front of it
                moment["gradients"] = max(moment.get("gradients", 0), costs(z, r.outputs)["gradients"][1])
    return held + sums + sum(moment.values())
