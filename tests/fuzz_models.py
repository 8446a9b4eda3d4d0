"""Random models from a grammar: a seed gives a model, a batch and a sentence that says how it is composed.

    python tests/fuzz_models.py 17 33      # describes these models and compares them with the definition
    python tests/fuzz_models.py 0:300      # counts, and describes those that fail
    python tests/fuzz_models.py Ordered    # the smallest models with each block of that name; "singles": with any
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

import fuzz_blocks as blocks
from fuzz_blocks import Block

TOKENS = 9  # of a vocabulary


@dataclass(frozen=True)
class Case:
    """A model with what it is measured on."""

    seed: int
    fresh: Callable[[], nn.Module]  # the same model once more
    model: nn.Module
    x: Any
    y: Tensor
    output: Callable[[Any], Tensor] | None
    text: str
    mixes: bool  # do its examples see each other? Then a number is wrong
    chunk: int
    kernel: str  # outputs= of the tangent kernel
    initial: dict[str, Tensor]


class Grammar:
    """Rules that call each other; ``depth`` is what is left for blocks around blocks."""

    def __init__(self, r: Random, plain: bool) -> None:
        self.r, self.plain = r, plain

    def width(self) -> int:
        return self.r.choice([2, 3, 4, 5, 6])

    def vector(self, a: int, b: int, depth: int) -> Block:
        """[n,a] -> [n,b]."""
        r = self.r
        if self.plain or depth == 0 or r.random() < 0.35:
            return self.map(a, b)
        if r.random() < 0.15:
            return blocks.Experts(r, *(self.vector(a, b, depth - 1) for _ in range(2)))
        if r.random() < 0.1:
            c = self.width()
            return blocks.EarlyExit(r, self.map(a, c), self.vector(c, b, depth - 1), self.map(c, b))
        return self.around(lambda b: self.vector(a, b, depth - 1), a, b)

    def map(self, a: int, b: int) -> Block:
        return self.r.choice(blocks.PLAIN if self.plain else blocks.MAPS)(self.r, a, b)

    def around(self, inner: Callable[[int], Block], a: int, b: int) -> Block:
        """A block in a block; where what goes in and what comes out must be alike, a map follows."""
        kind = self.r.choice(blocks.AROUND)
        if not kind.same or a == b:
            return kind(self.r, inner(b))
        return Chain(kind(self.r, inner(a)), self.map_of_last(a, b))

    def map_of_last(self, a: int, b: int) -> Block:
        return blocks.Dense(self.r, a, b)

    def sequence(self, a: int, b: int, T: int, depth: int) -> Block:
        """[n,T,a] -> [n,T,b]."""
        r = self.r
        if self.plain:
            return r.choice([lambda: self.map(a, b), lambda: blocks.TimeConv(r, a, b, raw=False), lambda: Chain(
                blocks.Attention(r, a), self.map(a, b))])()
        if depth and r.random() < 0.5:
            return r.choice([
                lambda: self.around(lambda b: self.sequence(a, b, T, depth - 1), a, b),
                lambda: blocks.Folded(r, self.vector(a, b, depth - 1)),
                lambda: blocks.Unpadded(r, self.vector(a, b, depth - 1), b),
                lambda: blocks.Experts(r, *(self.sequence(a, b, T, depth - 1) for _ in range(2)))])()
        return r.choice([
            lambda: self.map(a, b),
            lambda: blocks.TimeFirst(r, self.map(a, b)),
            lambda: Chain(blocks.Attention(r, a), self.map(a, b)),
            lambda: Chain(blocks.OwnAttention(r, a), self.map(a, b)),
            lambda: Chain(blocks.Encoder(r, a), self.map(a, b)),
            lambda: blocks.TimeConv(r, a, b),
            lambda: Chain(blocks.Mixer(r, T), self.map(a, b)),
            lambda: Chain(blocks.Positions(r, T, a), self.map(a, b)),
            lambda: blocks.Recurrent(r, a, b),
            lambda: blocks.TokenExperts(r, a, b)])()

    def image(self, a: int, b: int, depth: int) -> Block:
        """[n,a,H,W] -> [n,b,H',W']."""
        r = self.r
        if depth and not self.plain and r.random() < 0.5:
            return self.around_image(a, b, depth)
        if self.plain:
            return blocks.Conv(r, a, b)
        return r.choice([lambda: blocks.Conv(r, a, b), lambda: blocks.Conv(r, a, b), lambda: blocks.SliceConv(r, a, b),
                         lambda: blocks.Deconv(r, a, b), lambda: blocks.Volume(r, a, b),
                         lambda: Chain(blocks.ImageNorm(r, a), blocks.Conv(r, a, b))])()

    def around_image(self, a: int, b: int, depth: int) -> Block:
        """Only those that allow another size of the image."""
        kind = self.r.choice([k for k in blocks.AROUND if not k.same])
        return kind(self.r, self.image(a, b, depth - 1))

    def model(self) -> Model:
        r = self.r
        source = r.choice(["vector", "vector", "sequence", "sequence", "image", "tokens", "tokens"])
        if r.random() < 0.35 and not self.plain:  # as many vectors as possible: they are quick
            source = "vector"
        return getattr(self, f"from_{source}")()

    def from_vector(self) -> Model:
        a, b, c = self.width(), self.width(), self.width()
        body = [self.vector(a, b, 2)]
        if self.r.random() < 0.25:
            body += [blocks.Dense(self.r, b, 6), blocks.AsTokens(self.r, 3), self.sequence(2, b, 3, 1), blocks.Pool(self.r)]
        body += [self.vector(b, c, 1)] if self.r.random() < 0.6 else [blocks.Dense(self.r, b, c)]
        return self.finished((a,), body, c)

    def from_sequence(self) -> Model:
        a, b, T = self.width(), self.width(), self.r.choice([2, 3, 4])
        body = [self.sequence(a, b, T, 2)]
        if self.r.random() < 0.5:
            c = self.width()
            body, b = [*body, self.sequence(b, c, T, 1)], c
        if self.r.random() < 0.2:  # an output for each token
            return self.finished((T, a), body, b)
        return self.finished((T, a), [*body, blocks.Pool(self.r)], b)

    def from_image(self) -> Model:
        a, b, c = self.r.choice([1, 2]), self.r.choice([2, 4]), self.r.choice([2, 4])
        body = [self.image(a, b, 2), self.image(b, c, 1)]
        if self.r.random() < 0.3:
            d = self.width()
            body, c = [*body, blocks.AsTokens(self.r, 0), self.map(c, d)], d
        return self.finished((a, 4, self.r.choice([3, 4])), [*body, blocks.Pool(self.r)], c)

    def from_tokens(self) -> Model:
        r, d, T = self.r, self.width(), self.r.choice([3, 4])
        if r.random() < 0.15 and not self.plain:
            return self.finished((T,), [blocks.Bag(r, TOKENS, d), self.vector(d, d, 1)], d, ids=True)
        lookup = blocks.Lookup(r, TOKENS, d, 0 if self.plain else None)
        body = [lookup, self.sequence(d, d, T, 1), blocks.Pool(r)]
        if r.random() < 0.3 and not self.plain:
            return Model(r, (T,), [*body, blocks.TiedOut(r, lookup), First(3)], ids=True)
        return self.finished((T,), body, d, ids=True)

    def finished(self, shape: tuple[int, ...], body: list[Block], d: int, ids: bool = False) -> Model:
        """With a read-out, and now and then something that mixes examples."""
        r = self.r
        if not self.plain and r.random() < 0.07:
            body.insert(r.randrange(1, len(body) + 1), blocks.Mixing(r))
        k = r.choice([1, 2, 3])
        out = blocks.Dense(r, d, k)
        out.act, out.text = nn.Identity(), f"Dense({d}->{k})"
        return Model(r, shape, [*body, out], ids)


def singles() -> dict[str, Callable[[Random], Model]]:
    """Every kind of block alone, between two plain layers: the smallest model that shows what is wrong with it."""
    models: dict[str, Callable[[Random], Model]] = {}

    def add(name: str, shape: tuple[int, ...], block: Callable[[Random], Block], way: int | None = None) -> None:
        def compose(r: Random) -> Model:
            before, middle, after = blocks.Dense(r, 4, 4), block(r), blocks.Dense(r, 4, 2)
            if way is not None:
                middle.way, middle.text = way, name
            ends = [blocks.Pool(r), after] if len(shape) == 2 else [after]
            return Model(r, shape, [before, middle, *ends])
        models[name] = compose

    for kind in dict.fromkeys(blocks.MAPS):
        add(kind.__name__, (4,), lambda r, kind=kind: kind(r, 4, 4))
    for around in dict.fromkeys(blocks.AROUND):
        for way in range(around.ways):
            add(f"{around.__name__}[{way}]", (4,), lambda r, kind=around: kind(r, blocks.Dense(r, 4, 4)), way)
    for way in range(2):
        add(f"Experts[{way}]", (4,), lambda r: blocks.Experts(r, blocks.Dense(r, 4, 4), blocks.Dense(r, 4, 4)), way)
    add("EarlyExit", (4,), lambda r: blocks.EarlyExit(r, *(blocks.Dense(r, 4, 4) for _ in range(3))))
    for sequence in (blocks.Attention, blocks.OwnAttention, blocks.Encoder):
        add(sequence.__name__, (3, 4), lambda r, kind=sequence: kind(r, 4))
    for moved in (blocks.TimeConv, blocks.Recurrent, blocks.TokenExperts):
        add(moved.__name__, (3, 4), lambda r, kind=moved: kind(r, 4, 4))
    add("Mixer", (3, 4), lambda r: blocks.Mixer(r, 3))
    add("Positions", (3, 4), lambda r: blocks.Positions(r, 3, 4))
    add("Folded", (3, 4), lambda r: blocks.Folded(r, blocks.Dense(r, 4, 4)))
    add("TimeFirst", (3, 4), lambda r: blocks.TimeFirst(r, blocks.Dense(r, 4, 4)))
    add("Unpadded", (3, 4), lambda r: blocks.Unpadded(r, blocks.Dense(r, 4, 4), 4))
    for way, name in enumerate(blocks.Mixing.WAYS):
        add(f"MIXING({name})", (4,), lambda r, way=way: Chain(blocks.Mixing(r, way), blocks.Dense(r, 4, 4)))
    return models | pictures_and_words()


def pictures_and_words() -> dict[str, Callable[[Random], Model]]:
    """Blocks that read images, and those that read ids."""
    models: dict[str, Callable[[Random], Model]] = {}
    for image in (blocks.Conv, blocks.SliceConv, blocks.Deconv, blocks.Volume):
        models[image.__name__] = lambda r, kind=image: Model(
            r, (2, 4, 4), [kind(r, 2, 4), blocks.Conv(r, 4, 4), blocks.Pool(r), blocks.Dense(r, 4, 2)])
    models["ImageNorm"] = lambda r: Model(
        r, (2, 4, 4), [blocks.Conv(r, 2, 4), blocks.ImageNorm(r, 4), blocks.Conv(r, 4, 4), blocks.Pool(r), blocks.Dense(r, 4, 2)])
    models["Bag"] = lambda r: Model(r, (3,), [blocks.Bag(r, TOKENS, 4), blocks.Dense(r, 4, 4), blocks.Dense(r, 4, 2)], ids=True)

    def words(r: Random, way: int, tied: bool) -> Model:
        lookup = blocks.Lookup(r, TOKENS, 4, way)
        ends = [blocks.TiedOut(r, lookup), First(3)] if tied else [blocks.Dense(r, 4, 2)]
        return Model(r, (3,), [lookup, blocks.Dense(r, 4, 4), blocks.Pool(r), *ends], ids=True)
    for way in range(4):
        models[f"Lookup[{way}]"] = lambda r, way=way: words(r, way, False)
        models[f"Lookup[{way}] tied"] = lambda r, way=way: words(r, way, True)
    return models


class Chain(Block):
    """One after the other."""

    def __init__(self, *parts: Block) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.text = " > ".join(p.text for p in parts)

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        for part in self.parts:
            h = part(h, s)
        return h


class First(Block):
    """The first k features."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k, self.text = k, f"First({k})"

    def forward(self, h: Tensor, s: Tensor) -> Tensor:
        return h[..., : self.k]


class Model(nn.Module):
    """f(x): a score is read from the inputs, or given beside them, and goes along."""

    def __init__(self, r: Random, shape: tuple[int, ...], body: list[Block], ids: bool = False) -> None:
        super().__init__()
        self.shape, self.ids = shape, ids
        self.body = nn.ModuleList(body)
        self.result, self.given = r.choice(["tensor", "tensor", "tuple", "dict"]), r.choice(["x", "x", "x s", "dict"])
        self.text = f"{shape}: {' > '.join(b.text for b in body)} | returns {self.result}, reads {self.given}"

    def forward(self, x: Tensor, s: Tensor | None = None) -> Any:
        if s is None:
            flat = x.detach().flatten(1).double()
            s = (flat[:, 0] - TOKENS / 2 if self.ids else flat[:, 0]) + 0.01 * torch.sin(flat.sum(1))
        h: Tensor = x
        for block in self.body:
            h = block(h, s)
        return {"tensor": h, "tuple": (h, s), "dict": {"aux": s, "logits": h}}[self.result]


def inputs(r: Random, model: Model, n: int) -> Any:
    """The first eight examples are often alike: all with positive scores that rise."""
    late = r.random() < 0.6
    if model.ids:
        x = torch.randint(0, TOKENS, (n, *model.shape))
        if late:
            x[:8, 0] = torch.randint(TOKENS // 2 + 1, TOKENS, (8,)).sort().values
        s = x[:, 0].double() - TOKENS / 2 + 0.01 * torch.rand(n, dtype=torch.float64)
    else:
        x = torch.randn(n, *model.shape, dtype=torch.float64)
        flat = x.view(n, -1)
        if late:
            flat[:8, 0] = 0.05 + 0.3 * torch.arange(8) + 0.1 * torch.rand(8)
        s = flat[:, 0].clone()
    return {"x": x, "x s": (x, s), "dict": {"x": x, "s": s}}[model.given]


def earlier(model: nn.Module) -> dict[str, Tensor]:
    """A state from which training could have come: other weights, tied ones alike, the row of a padding token zero."""
    moved = {id(p): p.detach() + 0.3 * p.detach().abs().mean() * torch.randn_like(p) for p in model.parameters()}
    for m in model.modules():
        if isinstance(m, nn.Embedding) and m.padding_idx is not None:
            moved[id(m.weight)][m.padding_idx] = 0
    return {name: moved.get(id(v), v).detach().clone() for name, v in model.state_dict(keep_vars=True).items()}


def logits(result: Any) -> Tensor:
    """What the model's tuple or dict is about."""
    return result["logits"] if isinstance(result, dict) else result[0]


def build(seed: int, plain: bool = False, compose: Callable[[Random], Model] | None = None) -> Case:
    """The model of a seed: always the same one. ``plain``: without tricks; ``compose`` makes one in place of the grammar."""
    r = Random(seed)
    tricks = not plain and compose is None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (Grammar(r, plain).model() if compose is None else compose(r)).double().eval()
        if tricks and r.random() < 0.1 and (pairs := blocks.pairs_of_equal_shape(model)):
            a, b = r.choice(pairs)
            b.weight = a.weight
            model.text += " | two weights tied"
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.3).add_(0.1 * torch.randn_like(p) * p.abs().mean())
            for m in model.modules():
                if isinstance(m, nn.Embedding) and m.padding_idx is not None:
                    m.weight[m.padding_idx] = 0
        if tricks and r.random() < 0.05:
            next(m for m in model.modules() if m._parameters and m is not model).requires_grad_(False)
            model.text += " | first weights frozen"
        n = r.randint(18, 30)
        x = inputs(r, model, n)
        with torch.no_grad():
            f = model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
        f = f if model.result == "tensor" else logits(f)
        y = torch.randn(f.shape, dtype=torch.float64)
        initial = earlier(model)
    text = f"seed {seed}, n={n} {model.text}"
    return Case(seed, lambda: build(seed, plain, compose).model, model,
                x, y, None if model.result == "tensor" else logits, text, "MIXING" in text,
                r.choice([256, 256, 5, 7, n - 1]), r.choice(["trace", "trace", "diagonal", "full"]), initial)


if __name__ == "__main__":
    import fuzz_compare
    fuzz_compare.main(sys.argv[1:])
