"""Products of per-example gradients between two batches, added up without forming more of them than a tile.

A kernel is "n m" (trace), "v n m" (diagonal) or "v n w m" (full). Where both batches are one, what is above the diagonal
(of examples; of tiles in a full kernel) may be wrong until ``mirror`` fills it from what is below. Dot products are taken in
the model's precision; sums over outputs, tiles and parameters are added up in the dtype of the kernel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from richter.instrument.captures import LayerCapture
from richter.instrument.stream import steps
from richter.kernels import operations
from richter.kernels.operations import Outputs, Size, cheapest, widths


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
    size = operations.tile_rows(v * n)
    if n >= size:
        return [(slice(k, k + 1), rows) for k in range(v) for rows in steps(n, size)]
    return [(k, slice(0, n)) for k in steps(v, size // n)]


def _below(n: int, m: int, size: int, same: bool) -> Iterator[tuple[slice, slice]]:
    """Pairs of blocks of rows and columns; on and below the diagonal where both sides are one."""
    for rows in steps(n, size):
        for columns in [slice(0, rows.stop)] if same else steps(m, 4 * operations.ROWS):
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
                outputs_at_once = max(1, 4 * operations.ROWS // B.shape[1])
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
    for rows, columns in _below(n, m, operations.tile_rows(n) if same else operations.ROWS, same):
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
        for some in steps(r, max(1, operations.NUMBERS // (each * d_out * d_in))):
            yield torch.einsum("vnsro,nsri->vnroi", c.g[..., some, :], c.h[..., some, :]).flatten(2)
        return
    d_out, d_in = c.g.shape[3], rows or c.W.shape[1]
    for some in steps(d_out, max(8, operations.NUMBERS // (each * d_in))):
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
    parts = min(operations.PARTS, max(1, n * s // operations.SQUARE)) if b is a else max(1, n * s // operations.ROWS)
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
    for rows in steps(n, operations.examples_at_once(n, w * m * s * d)):
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
