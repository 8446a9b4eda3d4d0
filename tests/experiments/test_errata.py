"""The errata page: every entry is shown by a test, a control or a derivation; and the tests that no other file has."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from richter.experiments import ledger
from richter.experiments.training import error, scaled
from richter.tasks import chain_monomial
from richter.theory import linear_models

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/errata.md").read_text(encoding="utf-8")
ROWS = [re.split(r" (?<!\\)\| ", text.strip("| ")) for text in PAGE.splitlines()
        if text.startswith("| ") and not text.startswith(("| place", "|---"))]
RECORDS = ledger.records()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[2][:30]}")
def test_every_erratum_is_shown(row: list[str]) -> None:
    assert len(row) == 4
    shown = row[3]
    tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
    controls = [(name, text.strip()) for name, text in re.findall(r"`([a-z0-9_]+)`: ([^;]+)", shown)]
    assert tests or controls or len(shown.removeprefix("Derivation: ")) > 60, "no test, no control and no derivation"
    for path, name in tests:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8")
    for name, text in controls:
        claims = [c for c in RECORDS[name, "paper"]["claims"] for control in c["controls"] if control["text"] == text]
        assert claims, f"{name} has no control {text!r}"
        for c in claims:
            assert all(control["outcome"] == "fails" for control in c["controls"] if control["text"] == text)
        assert name == "signal_fig20" or any(c["holds"] for c in claims)


def test_the_page_is_whole() -> None:
    assert len(ROWS) >= 40
    assert [f"## `{paper}`" in PAGE for paper in ("nfa", "rapid", "signal", "layerwise")] == [True] * 4


def test_the_printed_update_ascends() -> None:
    """W + eta C grad / (eps + |grad|) raises the loss at the first step; with a minus it falls."""
    data = chain_monomial(64, 16, 3, seed=0, standardise=True, dtype=torch.float64)
    changes = []
    for sign in (1.0, -1.0):
        model = scaled([16, 32, 32, 1], [1.0, 1.0, 0.01], seed=0)
        loss = (model(data.x) - data.y).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p += sign * 1e-3 * p.grad / (0.1 + p.grad.norm())
        changes.append(error(model, data.x, data.y) - loss.item())
    assert changes[0] > 0 > changes[1]


@pytest.mark.parametrize(("factor", "trains"), [(100.0, False), (0.01, True)])
def test_a_hundredfold_readout_does_not_train(factor: float, trains: bool) -> None:
    """The recipe of Fig. 4 at initial scale 1, by plain descent at its rate of 0.03: after 100 of 600 steps all units are dead,
    or the loss is not finite (three seeds of three)."""
    for seed in (0, 1):
        data = chain_monomial(256, 32, 5, seed=seed, standardise=True, dtype=torch.float64)
        model = scaled([32, 256, 256, 1], [1.0, 1.0, factor], seed=seed)
        optimiser = torch.optim.SGD(model.parameters(), lr=0.03)
        for _ in range(100):
            optimiser.zero_grad()
            (model(data.x) - data.y).square().mean().backward()
            optimiser.step()
        assert (model(data.x).std().item() > 0.3) is trains


def test_the_head_of_a_heavy_tail_is_half_learned() -> None:
    """sum_k rho_k / (rho_k + kappa) = n, solved by bisection: d = 5 features of intensity 1 and p - d of n / (p - d)."""
    def learnability(tail: float, d: int = 5, n: int = 100, p: int = 2000) -> float:
        rho = linear_models.spiked(d, p, tail)
        low, high = 1e-12, 1e6
        for _ in range(200):
            kappa = np.sqrt(low * high)
            low, high = (kappa, high) if (rho / (rho + kappa)).sum() > n else (low, kappa)
        return float(1 / (1 + kappa))
    assert learnability(100 / 1995) == pytest.approx(0.506, abs=1e-3)
    assert learnability(1 / 1995) == pytest.approx(0.990, abs=1e-3)
