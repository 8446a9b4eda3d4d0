"""Pieces of which random models are made: each maps every example on its own, and says what its linear maps wrote.

A block is called as ``block(h, s)``: h holds the examples along its first axis, s [n] is a score by which examples are routed,
sorted and counted. Every z = W h goes through ``oracles.wrote``, which is z itself unless the definition is being computed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, deque
from collections.abc import Callable
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from oracles import by_definition, wrote


class Block(nn.Module):
    """``text`` says what it is made of."""

    text = ""

    def inside(self, *blocks: Block) -> None:
        """Name it after its class and what is in it."""
        self.text = f"{type(self).__name__}({', '.join(b.text for b in blocks)})"


def call(linear: nn.Module, *h: Tensor) -> Tensor:
    """A module that is one linear map, channels last."""
    return wrote(linear, linear(*h))


def matrix_of(parameter: str, transposed: bool = False) -> Callable[[nn.Module], Tensor]:
    """W[d_out,d_in] of a module's own parameter."""
    return lambda m: (getattr(m, parameter).T if transposed else getattr(m, parameter)).detach().clone()


@torch.jit.script
def scripted(z: Tensor) -> Tensor:
    """tanh, compiled."""
    return torch.tanh(z)


def activation(r: Random) -> tuple[str, Callable[[Tensor], Tensor]]:
    """Some change what they read in place."""
    return r.choice([("tanh", torch.tanh), ("relu_", torch.relu_), ("gelu", F.gelu), ("silu_", lambda z: F.silu(z, inplace=True)),
                     ("tanh_", torch.tanh_), ("abs", torch.abs), ("linear", lambda z: z)] * 3 + [("jit", scripted)])


# ------------------------------------------------------------------------------- maps of the last axis: h[..., a] -> [..., b]


class Map(Block):
    """Base of those that have an activation behind them."""

    def __init__(self, r: Random, a: int, b: int) -> None:
        super().__init__()
        self.a, self.b = a, b
        name, self.act = activation(r)
        self.text = f"{type(self).__name__}({a}->{b}, {name})"
        self.build(r)

    def build(self, r: Random) -> None: ...

    def raw(self, *shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape) / math.sqrt(shape[-1]))

    def product(self, h: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return self.act(self.product(h))


class Dense(Map):
    def build(self, r: Random) -> None:
        self.lin = nn.Linear(self.a, self.b, bias=r.random() < 0.7)

    def product(self, h: Tensor) -> Tensor:
        return call(self.lin, h)


class Times(Map):
    """x @ W."""

    def build(self, r: Random) -> None:
        self.W = self.raw(self.a, self.b)
        self.bias = nn.Parameter(torch.randn(self.b)) if r.random() < 0.5 else None

    def product(self, h: Tensor) -> Tensor:
        z = wrote(self, h @ self.W, "W", matrix_of("W", transposed=True))
        return z if self.bias is None else z + self.bias


class TimesTransposed(Map):
    """x @ W.T, F.linear(x, W), F.linear(weight=W, input=x), x.matmul(W.t())."""

    def build(self, r: Random) -> None:
        self.W, self.form = self.raw(self.b, self.a), r.randrange(4)

    def product(self, h: Tensor) -> Tensor:
        W = self.W
        z = [lambda: h @ W.T, lambda: F.linear(h, W), lambda: F.linear(weight=W, input=h), lambda: h.matmul(W.t())][self.form]()
        return wrote(self, z, "W", matrix_of("W"))


class BothWays(Map):
    """tanh(x @ W) @ W.T, and then another map."""

    def build(self, r: Random) -> None:
        self.W, self.lin = self.raw(self.a, r.randint(2, 5)), nn.Linear(self.a, self.b)

    def product(self, h: Tensor) -> Tensor:
        z = torch.tanh(wrote(self, h @ self.W, "W", matrix_of("W", transposed=True)))
        return call(self.lin, torch.tanh(wrote(self, z @ self.W.T, "W.T", matrix_of("W"))))


class Einsum(Map):
    """All orders of operands and letters."""

    FORMS = ("...d,do->...o", "...d,od->...o", "do,...d->...o", "od,...d->...o")

    def build(self, r: Random) -> None:
        self.form = r.choice(self.FORMS)
        self.flat = r.random() < 0.5  # with plain letters
        self.W = self.raw(self.a, self.b) if "do" in self.form else self.raw(self.b, self.a)

    def product(self, h: Tensor) -> Tensor:
        form = self.form.replace("...", "nst"[: h.dim() - 1]) if self.flat else self.form
        operands = (self.W, h) if form.startswith(("do,", "od,")) else (h, self.W)
        return wrote(self, torch.einsum(form, *operands), "W", matrix_of("W", transposed="do" in form))


class Left(Map):
    """(W @ x^T)^T."""

    def build(self, r: Random) -> None:
        self.W = self.raw(self.b, self.a)

    def product(self, h: Tensor) -> Tensor:
        return wrote(self, (self.W @ h.mT).mT, "W", matrix_of("W"))


class Bmm(Map):
    def build(self, r: Random) -> None:
        self.W = self.raw(self.a, self.b)

    def product(self, h: Tensor) -> Tensor:
        rows = h.reshape(len(h), math.prod(h.shape[1:-1]), self.a)
        z = torch.bmm(rows, self.W.expand(len(h), -1, -1)).reshape(*h.shape[:-1], self.b)
        return wrote(self, z, "W", matrix_of("W", transposed=True))


class AddMM(Map):
    def build(self, r: Random) -> None:
        self.W, self.bias = self.raw(self.a, self.b), nn.Parameter(torch.randn(self.b))

    def product(self, h: Tensor) -> Tensor:
        z = torch.addmm(self.bias, h.reshape(-1, self.a), self.W).reshape(*h.shape[:-1], self.b)
        return wrote(self, z, "W", matrix_of("W", transposed=True))


class Slices(Map):
    """Two maps that are rows (or columns) of one parameter."""

    def build(self, r: Random) -> None:
        self.rows = r.random() < 0.5
        self.middle = r.randint(2, 4)
        self.W = self.raw(self.middle + self.b, self.a) if self.rows else self.raw(self.b, self.a + self.middle)
        self.second = self.raw(self.b, self.middle) if self.rows else self.raw(self.middle, self.a)

    def product(self, h: Tensor) -> Tensor:
        m = self.middle
        if self.rows:  # a part beside the other, which then has a map of its own
            z = torch.tanh(wrote(self, F.linear(h, self.W[:m]), "W.0", lambda o: o.W[:m].detach().clone()))
            y = wrote(self, F.linear(z, self.second), "second", matrix_of("second"))
            return y + wrote(self, F.linear(h, self.W[m:]), "W.1", lambda o: o.W[m:].detach().clone())
        z = torch.tanh(wrote(self, F.linear(h, self.second), "second", matrix_of("second")))
        a = self.a
        y = wrote(self, F.linear(h, self.W[:, :a]), "W.0", lambda o: o.W[:, :a].detach().clone())
        return y + wrote(self, z @ self.W[:, a:].T, "W.1", lambda o: o.W[:, a:].detach().clone())


class Normed(Map):
    """A weight computed from parameters."""

    def build(self, r: Random) -> None:
        norm = r.choice([parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.weight_norm])
        self.lin = norm(nn.Linear(self.a, self.b))
        self.text = f"{norm.__name__} {self.text}"

    def product(self, h: Tensor) -> Tensor:
        return call(self.lin, h)


class LowRank(Map):
    """x @ A @ B."""

    def build(self, r: Random) -> None:
        self.A = self.raw(self.a, 2)
        self.B = self.raw(2, self.b)

    def product(self, h: Tensor) -> Tensor:
        z = wrote(self, h @ self.A, "A", matrix_of("A", transposed=True))
        return wrote(self, z @ self.B, "B", matrix_of("B", transposed=True))


class Gated(Map):
    def build(self, r: Random) -> None:
        self.fused = r.random() < 0.5
        self.up = nn.Linear(self.a, 2 * self.b if self.fused else self.b)
        self.gate = None if self.fused else nn.Linear(self.a, self.b)

    def product(self, h: Tensor) -> Tensor:
        if self.gate is None:
            left, right = call(self.up, h).chunk(2, -1)
            return left * torch.sigmoid(right)
        return call(self.up, h) * torch.sigmoid(call(self.gate, h))


class Both(Map):
    """Nested containers."""

    def build(self, r: Random) -> None:
        self.parts = nn.ModuleDict({"left": nn.ModuleList([nn.Linear(self.a, self.b)]), "right": nn.Linear(self.a, self.b)})

    def product(self, h: Tensor) -> Tensor:
        return call(self.parts["left"][0], h) + torch.tanh(call(self.parts["right"], h))


class BilinearMap(Map):
    """x1^T A_o x2 is a linear map of the outer product of x1 and x2."""

    def build(self, r: Random) -> None:
        self.pair = nn.Bilinear(self.a, self.a, self.b)

    def product(self, h: Tensor) -> Tensor:
        z = self.pair(h, torch.tanh(h))
        return wrote(self.pair, z, matrix=lambda m: m.weight.detach().flatten(1).clone())


class Twice(Map):
    """One module called several times, with other things between."""

    def build(self, r: Random) -> None:
        self.first, self.shared, self.times = nn.Linear(self.a, self.b), nn.Linear(self.b, self.b), r.randint(2, 3)

    def product(self, h: Tensor) -> Tensor:
        z = call(self.first, h)
        for _ in range(self.times):
            z = call(self.shared, torch.tanh(z))
        return z


class Written(Map):
    """What a map wrote is changed in place, in many ways."""

    def build(self, r: Random) -> None:
        self.lin, self.way, self.act = nn.Linear(self.a, self.b), r.randrange(6), torch.tanh
        self.text = f"Written({self.a}->{self.b}, way {self.way})"

    def product(self, h: Tensor) -> Tensor:
        z = call(self.lin, h)
        if self.way == 0:
            z.relu_()
        elif self.way == 1:
            z.add_(h.mean(-1, keepdim=True))
        elif self.way == 2:
            z[..., 0] = torch.tanh(z[..., 0])
        elif self.way == 3:
            z.masked_fill_(z > 0.5, 0.5)
        elif self.way == 4:
            flat = z.view(-1, self.b)
            flat.index_put_((torch.arange(0, len(flat)), torch.zeros(len(flat), dtype=torch.long)), 0 * flat[:, 0].clone())
        else:
            z[..., : self.b // 2].mul_(-0.5)
            z.unsqueeze(-2).relu_()
        return z


class Viewed(Map):
    """Features seen through views, gathers, flips."""

    def build(self, r: Random) -> None:
        self.lin, self.way = nn.Linear(self.a, self.b), r.randrange(5)
        self.order = torch.randperm(self.b)
        self.text = f"{self.text[:-1]}, way {self.way})"

    def product(self, h: Tensor) -> Tensor:
        z = call(self.lin, h)
        if self.way == 0:
            return z[..., self.order]
        if self.way == 1:
            return z.gather(-1, self.order.expand_as(z))
        if self.way == 2:
            return z.sort(-1).values
        if self.way == 3:
            graph = torch.eye(self.b, dtype=z.dtype)[self.order].to_sparse()
            return torch.sparse.mm(graph, z.reshape(-1, self.b).T).T.reshape(z.shape)
        return z.flip(-1).contiguous()


class Groups(Map):
    """Features as positions: one small map at each."""

    def build(self, r: Random) -> None:
        self.split, self.small = nn.Linear(self.a, 6), nn.Linear(2, 2)
        self.out = nn.Linear(6, self.b)

    def product(self, h: Tensor) -> Tensor:
        z = torch.tanh(call(self.split, h)).unflatten(-1, (3, 2))
        return call(self.out, call(self.small, z).flatten(-2))


class Sign(torch.autograd.Function):
    """Straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.sign(x)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Binarised(Map):
    """The gradient of sign(z) is taken to be that of z."""

    def build(self, r: Random) -> None:
        self.lin, self.before = nn.Linear(self.a, self.b), r.random() < 0.5

    def product(self, h: Tensor) -> Tensor:
        return call(self.lin, Sign.apply(h)) if self.before else Sign.apply(call(self.lin, h))


class OwnLinear(torch.autograd.Function):
    """F.linear with its own backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, W: Tensor) -> Tensor:
        ctx.save_for_backward(x, W)
        return x @ W.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, W = ctx.saved_tensors
        return g @ W, g.reshape(-1, g.shape[-1]).T @ x.reshape(-1, x.shape[-1])


class OwnFunction(Map):
    """No one who does not know the Function can tell that it is a linear map."""

    def build(self, r: Random) -> None:
        self.W = self.raw(self.b, self.a)

    def product(self, h: Tensor) -> Tensor:
        return wrote(self, OwnLinear.apply(h, self.W), "W (opaque)", matrix_of("W"))


class Masked(Map):
    """A matrix that is computed in the forward pass: pruned, or a product of two."""

    def build(self, r: Random) -> None:
        self.W, self.V = self.raw(self.b, self.a), self.raw(self.a, self.a)
        self.register_buffer("keep", (torch.rand(self.b, self.a) < 0.7).double())
        self.pruned = r.random() < 0.5

    def product(self, h: Tensor) -> Tensor:
        if self.pruned:
            return wrote(self, F.linear(h, self.W * self.keep), "W (computed)", lambda m: (m.W * m.keep).detach())
        product = self.W @ self.V  # which is itself a map: of the rows of W by V, or of the columns of V by W
        product = wrote(self, product, "V (computed)", matrix_of("V", transposed=True))
        product = wrote(self, product, "W (computed)", matrix_of("W"), axis=0)
        return wrote(self, F.linear(h, product), "W V (computed)", lambda m: (m.W @ m.V).detach())


class Mapped(Map):
    """torch.vmap over examples."""

    def build(self, r: Random) -> None:
        self.lin = nn.Linear(self.a, self.b)

    def product(self, h: Tensor) -> Tensor:
        if by_definition():
            return wrote(self.lin, self.lin(h), " (vmap)", matrix_of("weight"))
        return torch.vmap(lambda row: self.lin(row))(h)


class Scaled(Map):
    """A parameter times what is read, and a map of it."""

    def build(self, r: Random) -> None:
        self.scale, self.lin = nn.Parameter(torch.randn(self.a)), nn.Linear(self.a, self.b)
        self.norm = r.choice([nn.LayerNorm(self.a), nn.Identity(), nn.RMSNorm(self.a), nn.GroupNorm(1, self.a)])

    def product(self, h: Tensor) -> Tensor:
        if isinstance(self.norm, nn.GroupNorm):
            h = self.norm(h.reshape(-1, self.a)).reshape(h.shape)
        else:
            h = self.norm(h)
        return call(self.lin, self.scale * h)


class Chunked(Map):
    """One fused map whose thirds are used differently."""

    def build(self, r: Random) -> None:
        self.mixer = nn.Linear(self.a, 3 * self.b)

    def product(self, h: Tensor) -> Tensor:
        p, q, v = call(self.mixer, h).split(self.b, -1)
        return torch.tanh(p) * q + v


class Elsewhere(Map):
    """A module's weight is used outside it too, as it is or transposed, in many models for negative scores only."""

    def build(self, r: Random) -> None:
        self.lin, self.late, self.backwards = nn.Linear(self.a, self.b), r.random() < 0.7, r.random() < 0.5
        self.text = f"{self.text[:-1]}, late: {self.late}, W.T: {self.backwards})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        z = torch.tanh(call(self.lin, h))
        if not self.late:
            return self.act(z + self.more(h, z))
        go = (s < 0).nonzero()[:, 0] if len(s) == len(h) else torch.arange(len(h))
        return self.act(z.index_add(0, go, self.more(h[go], z[go])) if len(go) else 1.0 * z)

    def more(self, h: Tensor, z: Tensor) -> Tensor:
        W = self.lin.weight
        if self.backwards:
            h = torch.tanh(wrote(self.lin, z @ W, "weight.T", matrix_of("weight", transposed=True)))
        return torch.tanh(wrote(self.lin, F.linear(h, W)))


class Energy(Map):
    """What is passed on is the derivative of something, taken in the forward pass."""

    def build(self, r: Random) -> None:
        self.first, self.out, self.vmapped = nn.Linear(self.a, 3), nn.Linear(self.a, self.b), r.random() < 0.4
        self.text = f"{self.text[:-1]}, vmap(grad): {self.vmapped})"

    def energy(self, h: Tensor) -> Tensor:
        return torch.tanh(wrote(self.first, self.first(h), " (differentiated)")).square().sum()

    def product(self, h: Tensor) -> Tensor:
        with torch.enable_grad():
            if self.vmapped and not by_definition():
                force = torch.func.vmap(torch.func.grad(self.energy))(h)
            else:
                h = h if h.requires_grad else h.detach().requires_grad_()
                force = torch.autograd.grad(self.energy(h), h, create_graph=True)[0]
        return call(self.out, force)


MAPS: list[type[Map]] = [Dense] * 4 + [
    Times, TimesTransposed, BothWays, Einsum, Left, Bmm, AddMM, Slices, Normed, LowRank, Gated, Both, BilinearMap, Twice, Written,
    Viewed, Groups, Binarised, OwnFunction, Masked, Mapped, Scaled, Chunked, Elsewhere, Elsewhere, Energy]
PLAIN: list[type[Map]] = [Dense, Dense, Gated, Both, Scaled]


# ------------------------------------------------------------- around any block: which examples, in which order, how often


class Around(Block):
    """A block within; what goes in and what comes out have the same shape where ``same``."""

    same = True
    ways = 1

    def __init__(self, r: Random, inner: Block) -> None:
        super().__init__()
        self.inner, self.way, self.level = inner, r.randrange(self.ways), r.choice([0.0, -0.3])
        self.text = f"{type(self).__name__}[{self.way}]({inner.text})"


class Residual(Around):
    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return h + self.inner(h, s)


class SubBatch(Around):
    """Only some of the examples go through."""

    ways = 4

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        go = s > self.level
        if not go.any():
            return h
        z = self.inner(h[go], s[go])
        if self.way == 0:
            return h.clone().index_put_((go,), z)
        if self.way == 1:
            h = h.clone()
            h[go] = z
            return h
        if self.way == 2:
            return h.index_copy(0, go.nonzero()[:, 0], z)
        return torch.cat([z, h[~go]])[torch.cat([go.nonzero()[:, 0], (~go).nonzero()[:, 0]]).argsort()]


class Ordered(Around):
    """Examples in another order inside."""

    same = False
    ways = 4

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        n = len(h)
        if self.way == 0:
            order = s.argsort()
        elif self.way == 1:
            order = torch.arange(n) ^ 1  # neighbours
            order = torch.where(order < n, order, torch.arange(n))
        elif self.way == 2:
            order = torch.arange(n).flip(0)
        else:
            order = (s.abs() * 3).floor().argsort(descending=True, stable=True)  # as if by length
        return self.inner(h[order], s[order])[order.argsort()]


class Again(Around):
    """A second use for some of the examples."""

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        h = self.inner(h, s)
        more = s < self.level - 0.2
        if more.any():
            h = h.clone()
            h[more] = self.inner(h[more], s[more])
        return h


class Loop(Around):
    """As often as the example wants, one to three times."""

    ways = 2

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        times = torch.where(s > self.level, 1, 2 + (s < self.level - 0.7).long())
        for i in range(int(times.max()) if len(times) else 0):
            go = times > i
            if self.way % 2:  # all are computed, some are kept
                h = torch.where(go.reshape(-1, *[1] * (h.dim() - 1)), self.inner(h, s), h)
            else:
                h = torch.zeros_like(h).index_put((go,), self.inner(h[go], s[go])) \
                    + torch.where(go.reshape(-1, *[1] * (h.dim() - 1)), 0.0, h)
        return h


class Pieces(Around):
    """Examples in pieces: halves, three at a time, one by one; or filled up to a multiple of four."""

    same = False
    ways = 4

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        if self.way == 3:
            fill = -len(h) % 4
            return self.inner(F.pad(h, (0, 0) * (h.dim() - 1) + (0, fill)), F.pad(s, (0, fill)))[: len(h)]
        size = [(len(h) + 1) // 2, 3, 1][self.way]
        return torch.cat([self.inner(*part) for part in zip(h.split(size), s.split(size), strict=True)])


class Doubled(Around):
    """Every example twice, behind each other or beside each other."""

    same = False
    ways = 2

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        if self.way % 2:
            z = self.inner(torch.cat([h, -h]), torch.cat([s, s]))
            return z[: len(h)] + torch.tanh(z[len(h):])
        z = self.inner(h.repeat_interleave(2, 0), s.repeat_interleave(2, 0))
        return z[::2] * torch.tanh(z[1::2])


class Checkpointed(Around):
    """Recomputed in the backward pass, in both of torch's ways."""

    same = False
    ways = 2

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        if by_definition():
            return self.inner(h, s)
        h = h if h.requires_grad else h.detach().requires_grad_()
        with set_checkpoint_early_stop(False):  # a compiled function would not let the exception pass by which it stops
            return checkpoint(self.inner, h, s, use_reentrant=self.way == 0)


class Recomputed(torch.autograd.Function):
    """The forward pass keeps nothing; the backward pass runs it again, and leaves its gradients with the weights."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, s: Tensor, block: Block) -> Tensor:
        ctx.save_for_backward(h, s)
        ctx.block = block
        with torch.no_grad():
            return block(h, s)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, None, None]:
        h, s = ctx.saved_tensors
        h = h.detach().requires_grad_()
        with torch.enable_grad():
            torch.autograd.backward(ctx.block(h, s), g)
        return h.grad, None, None


class Reversible(Around):
    same = False

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        if by_definition():
            return self.inner(h, s)
        return Recomputed.apply(h if h.requires_grad else h.detach().requires_grad_(), s, self.inner)


class Hooked(Around):
    """A hook changes the gradient of each example on its own."""

    same = False
    ways = 4

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        z = self.inner(h, s)
        if not z.requires_grad:
            return z
        change: Callable[[Tensor], Tensor]
        if self.way == 0:
            change = lambda g: 0.5 * g  # noqa: E731
        elif self.way == 1:
            change = lambda g: g - 0.5 * g.mean(-1, keepdim=True)  # noqa: E731
        elif self.way == 2:
            change = lambda g: g * (1 + s.abs()).reshape(-1, *[1] * (g.dim() - 1))  # noqa: E731
        else:
            change = lambda g: g.flip(-1)  # noqa: E731
        z = z * 1.0
        z.register_hook(change)
        return z


class Stateful(Around):
    """Things that a forward pass changes, and that no output depends on."""

    same = False
    ways = 4

    def __init__(self, r: Random, inner: Block) -> None:
        super().__init__(r, inner)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))
        self.count, self.last, self.recent, self.tally = 0, torch.zeros(1), deque([1], maxlen=3), Counter()
        self.nested, self.space, self.array = {"a": [[0]]}, SimpleNamespace(step=0), np.zeros(2)
        self.source, self.stream = torch.Generator().manual_seed(5), np.random.default_rng(5)

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        if self.way == 0:
            self.calls += 1
            self.mean.mul_(0.9).add_(0.1 * h.detach().mean())
            self.count += 1
        elif self.way == 1:
            self.last = h.detach().mean()
            self.recent.append(len(h))
            self.tally["forward"] += 1
        elif self.way == 2:
            self.nested["a"][0].append(len(h))
            self.space.step += 1
            self.array += 1
        else:
            torch.rand(2, generator=self.source)
            self.stream.normal()
        return self.inner(h, s)


class Experts(Block):
    """Each example goes to one of several."""

    same = False

    def __init__(self, r: Random, *experts: Block) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)
        self.way = r.randrange(2)
        self.text = f"Experts[{self.way}]({', '.join(e.text for e in experts)})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        to = (s < 0).long()
        parts, order = [], []
        for i, expert in enumerate(self.experts):
            go = (to == i).nonzero()[:, 0]
            if len(go) or self.way == 1:  # some call an expert with no example at all
                parts.append(expert(h[go], s[go]))
                order.append(go)
        return torch.cat(parts)[torch.cat(order).argsort()] if parts else self.experts[0](h, s)


class EarlyExit(Block):
    """Those that are sure leave by the first door."""

    same = False

    def __init__(self, r: Random, first: Block, rest: Block, door: Block) -> None:
        super().__init__()
        self.first, self.rest, self.door = first, rest, door
        self.inside(first, rest, door)

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        h = self.first(h, s)
        out = self.door(h, s)
        stay = s < 0
        if stay.any():
            out = out.index_put((stay,), self.rest(h[stay], s[stay]))
        return out


AROUND: list[type[Around]] = [
    Residual, Residual, SubBatch, SubBatch, Ordered, Ordered, Again, Loop, Pieces, Doubled, Checkpointed, Reversible, Hooked,
    Stateful]


# ---------------------------------------------------------------------------------------- sequences: h[n,T,a] -> [n,T,b]


class Attention(Block):
    """nn.MultiheadAttention, examples first or second."""

    def __init__(self, r: Random, d: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(d, r.choice([1, 2]) if d % 2 == 0 else 1, batch_first=r.random() < 0.5,
                                          bias=r.random() < 0.7)
        self.text = f"Attention({d}, batch_first={self.attn.batch_first})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        if by_definition():
            return self.definition(h)
        if self.attn.batch_first:
            return self.attn(h, h, h, need_weights=False)[0]
        x = h.transpose(0, 1)
        return self.attn(x, x, x)[0].transpose(0, 1)

    def definition(self, h: Tensor) -> Tensor:
        return attention_by_definition(self.attn, h)


def attention_by_definition(attn: nn.MultiheadAttention, h: Tensor) -> Tensor:
    """head = softmax(q k^T / sqrt(d)) v, of [n,T,d]."""
    parts = []
    biases = [0.0] * 3 if attn.in_proj_bias is None else attn.in_proj_bias.chunk(3)
    for i, W in enumerate(attn.in_proj_weight.chunk(3)):
        part = wrote(attn, h @ W.T + biases[i], "qkv"[i], lambda m, i=i: m.in_proj_weight.detach().chunk(3)[i].clone())
        parts.append(part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2))
    q, k, v = parts
    mixed = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1) @ v
    mixed, out = mixed.transpose(1, 2).flatten(2), attn.out_proj
    return wrote(out, mixed @ out.weight.T + (0.0 if out.bias is None else out.bias))


class Encoder(Block):
    """nn.TransformerEncoderLayer, which has a fast path of its own."""

    def __init__(self, r: Random, d: int) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(d, 1, 5, dropout=0.1, batch_first=True, norm_first=r.random() < 0.5)
        self.text = f"Encoder({d}, norm_first={self.layer.norm_first})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        m = self.layer
        if not by_definition():
            return m(h)

        def feed(x: Tensor) -> Tensor:
            return call(m.linear2, torch.relu(call(m.linear1, x)))
        if m.norm_first:
            h = h + attention_by_definition(m.self_attn, m.norm1(h))
            return h + feed(m.norm2(h))
        h = m.norm1(h + attention_by_definition(m.self_attn, h))
        return m.norm2(h + feed(h))


class OwnAttention(Block):
    """Raw parameters, causal."""

    def __init__(self, r: Random, d: int) -> None:
        super().__init__()
        self.Q, self.K, self.V = (nn.Parameter(torch.randn(d, d) / math.sqrt(d)) for _ in range(3))
        self.text = f"OwnAttention({d})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        q, k, v = (wrote(self, h @ getattr(self, w), w, matrix_of(w, transposed=True)) for w in "QKV")
        later = torch.ones(h.shape[1], h.shape[1], dtype=torch.bool).triu(1)
        return (q @ k.mT).masked_fill_(later, -math.inf).softmax(-1) @ v


class TimeConv(Block):
    """A convolution along the tokens; some see only the past."""

    def __init__(self, r: Random, a: int, b: int, raw: bool | None = None) -> None:
        super().__init__()
        self.causal, self.raw = r.random() < 0.5, r.random() < 0.3 if raw is None else raw
        self.conv = nn.Conv1d(a, b, 3, padding=0 if self.causal else 1)
        self.text = f"TimeConv({a}->{b}, causal={self.causal}, F.conv1d={self.raw})"
        if self.raw:
            self.kernel = nn.Parameter(torch.randn(b, a, 3) / math.sqrt(3 * a))
            del self.conv

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        x = h.transpose(1, 2)
        x = F.pad(x, (2, 0)) if self.causal else x
        if self.raw:
            z = F.conv1d(x, self.kernel, padding=0 if self.causal else 1)
            z = wrote(self, z, "kernel", lambda m: m.kernel.detach().flatten(1).clone(), axis=1)
        else:
            z = wrote(self.conv, self.conv(x), axis=1)
        return torch.tanh(z).transpose(1, 2)


class Mixer(Block):
    """A linear map of all tokens, at each feature."""

    def __init__(self, r: Random, T: int) -> None:
        super().__init__()
        self.mix = nn.Linear(T, T)
        self.text = f"Mixer({T})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return h + call(self.mix, h.transpose(1, 2)).transpose(1, 2)


class Positions(Block):
    """Something for each position, the same for all examples."""

    def __init__(self, r: Random, T: int, d: int) -> None:
        super().__init__()
        self.looked_up = r.random() < 0.6
        if self.looked_up:
            self.table = nn.Embedding(T, d)
        else:
            self.added = nn.Parameter(torch.randn(T, d))
        self.text = f"Positions(looked up: {self.looked_up})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return h + (call(self.table, torch.arange(h.shape[1])) if self.looked_up else self.added)


def token_counts(s: Tensor, T: int) -> Tensor:
    """How many tokens are real, 1 to T: all of them where the score is positive."""
    return torch.where(s > 0, T, 1 + (s.abs() * 7).long() % T)


class Recurrent(Block):
    """nn.LSTM, nn.GRU or nn.RNN; some read only the real tokens, packed."""

    def __init__(self, r: Random, a: int, b: int) -> None:
        super().__init__()
        kind, self.packed = r.choice([nn.LSTM, nn.GRU, nn.RNN]), r.random() < 0.3
        self.rnn = kind(a, b, batch_first=r.random() < 0.6)
        self.text = f"{kind.__name__}({a}->{b}, batch_first={self.rnn.batch_first}, packed={self.packed})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        T = h.shape[1]
        lengths = token_counts(s, T) if self.packed and len(s) else None  # of no example there is nothing to pack
        if by_definition():
            return self.definition(h, T if lengths is None else int(lengths[0]))
        x = h if self.rnn.batch_first else h.transpose(0, 1)
        if lengths is not None:
            pack = pack_padded_sequence(x, lengths, batch_first=self.rnn.batch_first, enforce_sorted=False)
            z = pad_packed_sequence(self.rnn(pack)[0], batch_first=self.rnn.batch_first, total_length=T)[0]
        else:
            z = self.rnn(x)[0]
        return z if self.rnn.batch_first else z.transpose(0, 1)

    def gate(self, x: Tensor, side: str, i: int) -> Tensor:
        """W x + b of one gate, of one side: ih or hh."""
        rnn, d, packed = self.rnn, self.rnn.hidden_size, " (packed)" if self.packed else ""
        W, b = (getattr(rnn, f"{kind}_{side}_l0")[i * d : (i + 1) * d] for kind in ("weight", "bias"))
        return wrote(rnn, x @ W.T + b, f"{side}.{i}{packed}",
                     lambda m: getattr(m, f"weight_{side}_l0")[i * d : (i + 1) * d].detach().clone())

    def definition(self, h: Tensor, length: int) -> Tensor:
        """One example, [1,T,a], or what a block around it made of one."""
        state = cell = h.new_zeros(len(h), self.rnn.hidden_size)
        rows = []
        for t in range(h.shape[1]):
            if t >= length:
                rows.append(torch.zeros_like(state))
                continue
            x = h[:, t]
            if isinstance(self.rnn, nn.RNN):
                state = torch.tanh(self.gate(x, "ih", 0) + self.gate(state, "hh", 0))
            elif isinstance(self.rnn, nn.GRU):
                reset, update = (torch.sigmoid(self.gate(x, "ih", i) + self.gate(state, "hh", i)) for i in range(2))
                new = torch.tanh(self.gate(x, "ih", 2) + reset * self.gate(state, "hh", 2))
                state = (1 - update) * new + update * state
            else:
                i, f, g, o = (self.gate(x, "ih", i) + self.gate(state, "hh", i) for i in range(4))
                cell = torch.sigmoid(f) * cell + torch.sigmoid(i) * torch.tanh(g)
                state = torch.sigmoid(o) * torch.tanh(cell)
            rows.append(state)
        return torch.stack(rows, 1)


class Folded(Block):
    """Tokens as if they were examples: [n T,d], or [T n,d]."""

    def __init__(self, r: Random, inner: Block) -> None:
        super().__init__()
        self.inner, self.time_first = inner, r.random() < 0.5
        self.text = f"Folded({'T n' if self.time_first else 'n T'}, {inner.text})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        n, T, _ = h.shape
        if self.time_first:
            z = self.inner(h.transpose(0, 1).flatten(0, 1), s.repeat(T))
            return z.unflatten(0, (T, n)).transpose(0, 1)
        return self.inner(h.flatten(0, 1), s.repeat_interleave(T)).unflatten(0, (n, T))


class TimeFirst(Block):
    """[T,n,d] for maps of the last axis, which get no scores: examples are not the first axis here."""

    def __init__(self, r: Random, inner: Block) -> None:
        super().__init__()
        self.inner = inner
        self.inside(inner)

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return self.inner(h.transpose(0, 1), s[:0]).transpose(0, 1)


class Unpadded(Block):
    """Only real tokens are computed, all examples' in one row."""

    def __init__(self, r: Random, inner: Block, b: int) -> None:
        super().__init__()
        self.inner, self.b, self.time_first = inner, b, r.random() < 0.3
        self.inside(inner)

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        n, T, _ = h.shape
        real = torch.arange(T) < token_counts(s, T)[:, None]
        if self.time_first:
            out = h.new_zeros(T, n, self.b)
            out[real.T] = self.inner(h.transpose(0, 1)[real.T], s.expand(T, n)[real.T])
            return out.transpose(0, 1)
        out = h.new_zeros(n, T, self.b)
        out[real] = self.inner(h[real], s[:, None].expand(n, T)[real])
        return out


class TokenExperts(Block):
    """Each token goes to one of two."""

    def __init__(self, r: Random, a: int, b: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(a, b), nn.Linear(a, b)])
        self.text = f"TokenExperts({a}->{b})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        to = (h.detach().sum(-1) + s[:, None] < 0).long()
        flat, z = h.flatten(0, 1), h.new_zeros(*h.shape[:2], self.experts[0].out_features).flatten(0, 1)
        for i, expert in enumerate(self.experts):
            go = (to.flatten() == i).nonzero()[:, 0]
            if len(go):
                z.index_add_(0, go, call(expert, flat[go]))
        return torch.tanh(z).unflatten(0, h.shape[:2])


# ------------------------------------------------------------------------------------- images: h[n,a,H,W] -> [n,b,H',W']


class Conv(Block):
    def __init__(self, r: Random, a: int, b: int) -> None:
        super().__init__()
        groups = r.choice([1, 1, math.gcd(a, b)])
        mode = r.choice(["zeros", "zeros", "circular", "replicate", "reflect"])
        size, stride = r.choice([1, 2, 3]), r.choice([1, 1, 2])
        self.conv = nn.Conv2d(a, b, size, stride=stride, padding=1, groups=groups, padding_mode=mode, bias=r.random() < 0.6)
        name, self.act = activation(r)
        self.text = f"Conv({a}->{b}, {size}, stride {stride}, groups {groups}, {mode}, {name})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return self.act(wrote(self.conv, self.conv(h), axis=1))


class SliceConv(Block):
    """F.conv2d with some of the channels of a larger kernel."""

    def __init__(self, r: Random, a: int, b: int) -> None:
        super().__init__()
        self.kernel, self.b = nn.Parameter(torch.randn(b + 1, a, 3, 3) / math.sqrt(9 * a)), b
        self.whole = r.random() < 0.5
        self.text = f"SliceConv({a}->{b}, whole={self.whole})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        b = self.b + 1 if self.whole else self.b
        z = wrote(self, F.conv2d(h, self.kernel[:b] if not self.whole else self.kernel, padding=1), "kernel",
                  lambda m: m.kernel[:b].detach().flatten(1).clone(), axis=1)
        return torch.tanh(z[:, : self.b])


class Deconv(Block):
    """A transposed convolution: each input pixel writes a patch."""

    def __init__(self, r: Random, a: int, b: int) -> None:
        super().__init__()
        size, stride, groups = r.choice([2, 3]), r.choice([1, 2]), r.choice([1, 1, math.gcd(a, b)])
        self.conv = nn.ConvTranspose2d(a, b, size, stride=stride, padding=1, groups=groups)
        self.text = f"Deconv({a}->{b}, {size}, stride {stride}, groups {groups})"

    @staticmethod
    def matrix(m: nn.Module) -> Tensor:
        """[b size size, a]: what one input channel adds to a patch, a block for each group."""
        weight = m.weight.detach()
        a, b, groups = m.in_channels, m.out_channels // m.groups, m.groups
        W = weight.new_zeros(m.out_channels, *m.kernel_size, a)
        for channel in range(a):
            group = channel // (a // groups)
            W[group * b : (group + 1) * b, ..., channel] = weight[channel]
        return W.flatten(0, -2)

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        c = self.conv

        def patches(g: Tensor) -> Tensor:
            return F.unfold(g, c.kernel_size, c.dilation, c.padding, c.stride).mT.flatten(0, 1)  # type: ignore[arg-type]
        return torch.tanh(wrote(c, c(h), matrix=self.matrix, rows=patches))


class Volume(Block):
    """A convolution of three axes, the first of which has two places."""

    def __init__(self, r: Random, a: int, b: int) -> None:
        super().__init__()
        self.conv = nn.Conv3d(a, b, (2, 2, 3), padding=(0, 1, 1))
        self.text = f"Volume({a}->{b})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return torch.tanh(wrote(self.conv, self.conv(torch.stack([h, torch.tanh(h)], 2)), axis=1)).squeeze(2)


class ImageNorm(Block):
    def __init__(self, r: Random, d: int) -> None:
        super().__init__()
        self.norm = r.choice([nn.GroupNorm(1, d), nn.BatchNorm2d(d), nn.InstanceNorm2d(d, affine=True)])
        if isinstance(self.norm, nn.BatchNorm2d):
            nn.init.normal_(self.norm.running_mean)
        self.text = f"{type(self.norm).__name__}({d})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return self.norm(h)


# ------------------------------------------------------------------------------------------------ tokens, and read-outs


class ScaledEmbedding(nn.Embedding):
    """As some language models have it."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 1.7


class Lookup(Block):
    """[n,T] ids -> [n,T,d]."""

    def __init__(self, r: Random, vocabulary: int, d: int, way: int | None = None) -> None:
        super().__init__()
        self.way, self.tiny = r.randrange(4) if way is None else way, r.random() < 0.2
        if self.way == 2:
            self.table = nn.Parameter(torch.randn(vocabulary, d))
        else:
            kind = ScaledEmbedding if self.way == 3 else nn.Embedding
            self.embed = kind(vocabulary, d, padding_idx=r.choice([None, None, 0]) if self.way != 3 else None)
        with torch.no_grad():
            (self.table if self.way == 2 else self.embed.weight).mul_(1e-5 if self.tiny else 1.0)
        self.text = f"Lookup({vocabulary}->{d}, way {self.way}, tiny={self.tiny})"

    @property
    def weight(self) -> Tensor:
        return self.table if self.way == 2 else self.embed.weight

    def forward(self, ids: Tensor, s: Tensor) -> Tensor:
        if self.way == 2:
            z = wrote(self, F.embedding(ids, self.table), "table", matrix_of("table", transposed=True))
        elif self.way == 3:  # the table times a number is another table
            z = wrote(self.embed, self.embed(ids))
        else:
            z = call(self.embed, ids)
        return 1e5 * z if self.tiny else z


class Bag(Block):
    """[n,T] ids -> [n,d]."""

    def __init__(self, r: Random, vocabulary: int, d: int) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(vocabulary, d, mode=r.choice(["sum", "mean"]))
        self.text = f"Bag({vocabulary}->{d}, {self.bag.mode})"

    def forward(self, ids: Tensor, s: Tensor) -> Tensor:
        return wrote(self.bag, self.bag(ids), matrix=matrix_of("weight", transposed=True))


class TiedOut(Block):
    """The table of tokens is also the last map."""

    def __init__(self, r: Random, lookup: Lookup) -> None:
        super().__init__()
        self.way, registered = r.randrange(2), r.random() < 0.5
        self.text = f"TiedOut(registered twice: {registered})"
        self.lookups: Any = nn.ModuleList([lookup]) if registered else (lookup,)

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        lookup = self.lookups[0]
        raw = lookup.way == 2
        owner, name = (lookup, "table") if raw else (lookup.embed, "weight")
        z = F.linear(h, lookup.weight) if self.way == 0 else h @ lookup.weight.T
        return wrote(owner, z, f"{name}.T", matrix_of(name))


class Pool(Block):
    """[n,T,d] -> [n,d], or [n,C,H,W] -> [n,C]."""

    def __init__(self, r: Random) -> None:
        super().__init__()
        self.way = r.randrange(5)
        self.text = f"Pool(way {self.way})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        h = h.flatten(2).transpose(1, 2) if h.dim() == 4 else h
        if self.way == 0:
            return h.mean(1)
        if self.way == 1:
            return h[:, -1]
        if self.way == 2:  # equal tokens would be tied, and rounding would choose the one that gets the gradient
            return (h + 1e-3 * torch.arange(h.shape[1], dtype=h.dtype, device=h.device)[:, None]).amax(1)
        if self.way == 3:
            last = (token_counts(s, h.shape[1]) - 1)[:, None, None]  # of those that are real
            return h.gather(1, last.expand(-1, 1, h.shape[2]))[:, 0]
        return torch.tanh(h).sum(1)


class AsTokens(Block):
    """Features, or the pixels of an image, as tokens."""

    def __init__(self, r: Random, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens
        self.text = "AsTokens"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return h.unflatten(-1, (self.tokens, -1)) if h.dim() == 2 else h.flatten(2).transpose(1, 2)


# ----------------------------------------------------------------------------------------- what examples may not do


class Mixing(Block):
    """Examples see each other, forward or backward, all or only some of them."""

    WAYS = ("BatchNorm1d without running statistics", "batch mean, detached", "backward hook: mean over the batch",
            "backward hook: norm over the batch", "attention across the batch", "the best of the batch",
            "late: mean of those with a negative score", "previous example", "order of examples not put back")

    def __init__(self, r: Random, way: int | None = None) -> None:
        super().__init__()
        self.way = r.randrange(len(self.WAYS)) if way is None else way
        self.text = f"MIXING({self.WAYS[self.way]})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        shape, h = h.shape, h.flatten(1)
        if self.way == 0:
            h = nn.functional.batch_norm(h, None, None, training=True) if len(h) > 1 else h
        elif self.way == 1:
            h = (h - h.detach().mean(0)) / (h.detach().std(0, correction=0) + 1)
        elif self.way in (2, 3) and h.requires_grad:
            h = h * 1.0
            h.register_hook((lambda g: g - 0.5 * g.mean(0)) if self.way == 2 else (lambda g: g / (0.1 + g.norm())))
        elif self.way == 4:
            h = h + (h @ h.T).softmax(-1) @ h
        elif self.way == 5:
            h = h - h.amax(0)
        elif self.way == 6:
            h = torch.where((s < 0)[:, None], h - (h * (s < 0)[:, None]).mean(0), h)
        elif self.way == 7:
            h = h + 0.3 * h.roll(1, 0)
        elif self.way == 8:
            h = h[s.argsort()]
        return h.reshape(shape)


def pairs_of_equal_shape(model: nn.Module) -> list[tuple[nn.Linear, nn.Linear]]:
    """Plain linear layers whose weights could be one."""
    plain = [m for m in model.modules() if type(m) is nn.Linear and "weight" in m._parameters]
    return [(a, b) for a, b in itertools.combinations(plain, 2) if a.weight.shape == b.weight.shape and a.weight is not b.weight]
