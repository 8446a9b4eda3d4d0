"""Proposition 8 of [nfa], corrected: the mean early growth of NFM and AGOP of one quadratic layer over random networks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from richter.experiments.kit import Claim, Control, Experiment, Interval, Ref, Results, Task, Writer
from richter.report.drawing import COLOURS, caption, label, panels, points, styled
from richter.theory import freeprob

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Formula = Literal["corrected", "printed", "limit"]


@dataclass(frozen=True)
class NfaProp8Settings:
    """f(x) = a . (W x)^2 / 2 with W ~ N(0, 1/k), a ~ N(0, 1), and the residual -y."""

    n: int = 6
    d: int = 4
    widths: tuple[int, ...] = (4, 16, 64)
    draws: int = 100_000  # of networks
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    formula: Formula = "corrected"  # printed: 3 Tr(B) M^2 + 6 M B M; limit: M B M alone, which is that of wide networks
    printed: Formula = "printed"  # what is called the printed formula
    first: Literal["square", "divided"] = "square"  # E[W'^T W'] as M^2, or divided by the width


def formulas(x: Float[Tensor, "n d"], y: Float[Tensor, " n"], width: int) -> dict[str, Float[Tensor, "d d"]]:
    """E[W'^T K W'] as corrected, as printed, and of infinitely wide networks."""
    M, B = x.T @ (y[:, None] * x), x.T @ x
    return {"corrected": torch.as_tensor(freeprob.expected_second_derivatives(x, y, width)[1]),
            "printed": 3 * B.trace() * M @ M + 6 * M @ B @ M, "limit": M @ B @ M}


def sampled(x: Float[Tensor, "n d"], y: Float[Tensor, " n"], width: int, draws: int, seed: int
            ) -> tuple[Float[Tensor, "d d"], Float[Tensor, "d d"]]:
    """Means of W'^T W' and W'^T K W' over networks: J = df/dh = a h, W' = sum_n y_n J_n x_n^T."""
    draw = torch.Generator().manual_seed(seed)
    d, size = x.shape[1], 5_000
    nfm, agop = torch.zeros(d, d, dtype=x.dtype), torch.zeros(d, d, dtype=x.dtype)
    for _ in range(draws // size):
        W = torch.randn(size, width, d, generator=draw, dtype=x.dtype) / width ** 0.5
        a = torch.randn(size, 1, width, generator=draw, dtype=x.dtype)
        J = a * (x @ W.mT)  # [networks, n, width]
        speed = J.mT @ (y[:, None] * x)
        response = (J @ speed).flatten(0, 1)
        nfm += speed.flatten(0, 1).T @ speed.flatten(0, 1)
        agop += response.T @ response
    return nfm / (draws // size * size), agop / (draws // size * size)


def work(t: Task[NfaProp8Settings], run: Writer) -> Mapping[str, ArrayLike]:
    """Relative errors of the formulas: against sampled networks, and at width 2 against every network of a quadrature."""
    s = t.settings
    draw = np.random.default_rng((t.seed, 14))
    x, y = torch.from_numpy(draw.standard_normal((s.n, s.d))), torch.from_numpy(draw.standard_normal(s.n))
    nfm, agop = sampled(x, y, t.width, s.draws, t.seed)
    M = x.T @ (y[:, None] * x)
    exact = torch.as_tensor(freeprob.simulate_second_derivatives(x[:, :2], y, 2)[1])
    return {"square": apart(M @ M, nfm), "divided": apart(M @ M / t.width, nfm),
            **{f"sampled_{name}": apart(F, agop) for name, F in formulas(x, y, t.width).items()},
            **{f"exact_{name}": apart(F, exact) for name, F in formulas(x[:, :2], y, 2).items()}}


def apart(A: Float[Tensor, "d d"], B: Float[Tensor, "d d"]) -> float:
    """Relative distance |A - B| / |B|."""
    return ((A - B).norm() / B.norm()).item()


def error(r: Results, kind: str, formula: str = "") -> float:
    """Largest relative error of the expected second derivative over the widths."""
    return float(r[f"{kind}_{formula or r.settings.formula}"].max())


@styled
def draw(results: Results) -> Figure:
    figure, (ax,) = panels(1, across=1, width=4.4, height=3.0)
    widths = results.distinct("width")
    for k, (name, words) in enumerate((("corrected", "corrected"), ("printed", "as printed"), ("limit", "M B M alone"))):
        rows = np.array([results.where(width=width)[f"sampled_{name}"] for width in widths]).T
        points(ax, widths, rows, COLOURS[k], words, "osx"[k])
    label(ax, "width", "relative error of E[W'KW]", log="xy", legend=True)
    caption(figure, "The corrected formula gives the mean over random networks at every width, up to the error of sampling; "
                    "the printed one "
                    f"does not. Median and range of {len(results.distinct('seed'))} draws of the data.")
    return figure


PRINTED = Control("the formula as printed", {"formula": "printed"})
LIMIT = Control("the formula without the additional component", {"formula": "limit"})
BAR = "independent check of the proposition"
EXPERIMENT = Experiment(
    name="nfa_prop8", ref=Ref("nfa", "Prop. 8"), title="the mean early growth of NFM and AGOP of a quadratic layer",
    smoke=NfaProp8Settings(), paper=NfaProp8Settings(draws=400_000, seeds=tuple(range(10))), work=work,
    figures={"nfa_prop8": draw}, over=("width", "seed"), analysis=("formula", "printed", "first"),
    start={"draws": 5_000}, reduced="100,000 networks in the place of 400,000, 5 draws of the data in the place of 10",
    protocol="exact",
    claims=(
        Claim("corrected formula at width 2: largest relative error against quadrature over all networks, over draws of the data",
              lambda r: error(r, "exact"), Interval(high=1e-10), (PRINTED, LIMIT), paper="exact",
              source="an identity; rounding in float64",
              says="Prop. 8: E[W'^T K W'] of a quadratic layer is 3 Tr(B) M^2 + 6 M B M (corrected for width k).",
              reason="misprint"),
        Claim("corrected formula: relative error against sampled networks, largest over widths", lambda r: error(r, "sampled"),
              Interval(high=0.02), (PRINTED, LIMIT), source=BAR, over="seed",
              says="Prop. 8: E[W'^T K W'] of a quadratic layer is 3 Tr(B) M^2 + 6 M B M (corrected, on sampled networks).",
              reason="misprint"),
        Claim("E[W'^T W'] = M^2: relative error against sampled networks, largest over widths",
              lambda r: float(r[r.settings.first].max()), Interval(high=0.02),
              Control("M^2 divided by the width", {"first": "divided"}), paper="exact", source=BAR, over="seed",
              says="Prop. 8: E[W'^T W'] = M^2."),
        Claim("formula as printed: relative error against sampled networks, largest over widths",
              lambda r: error(r, "sampled", r.settings.printed), Interval(high=0.02),
              Control("the formula without the additional component", {"printed": "limit"}), paper="exact",
              source=BAR, over="seed",
              differs="it keeps only the terms of one neuron with itself and forgets 1/k, so that it is right at width 1 alone",
              says="Prop. 8 as printed: E[W'^T K W'] of a quadratic layer is 3 Tr(B) M^2 + 6 M B M.", reason="misprint",
              second="the corrected formula equals quadrature over all networks of width 2, "
                     "and the derivation in docs/errata.md"),
    ))
