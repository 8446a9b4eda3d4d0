"""Hard-routed networks beside their initial ones: a network that does not reach a layer asks nothing of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
from observing import draw, moved, state
from richter.core import Mark

CENTRED = ["double_centred_nfc", "ptk_centred_nfc", "dc_c_ratio", "cnfc"]


class Routed(nn.Module):
    """Each example goes to the expert that the gate prefers; ``tokens``: each of its tokens does."""

    def __init__(self, tokens: bool = False) -> None:
        super().__init__()
        self.gate, self.readout, self.tokens = nn.Linear(4, 2), nn.Linear(6, 3), tokens
        self.experts = nn.ModuleList([nn.Linear(4, 6), nn.Linear(4, 6)])

    def forward(self, x: Tensor) -> Tensor:
        score = self.gate(x if self.tokens else x.mean(1))
        weight, choice = score.softmax(-1), score.argmax(-1)
        mixed = x.new_zeros(*x.shape[:-1], 6)
        for e, expert in enumerate(self.experts):
            rows = choice == e
            if rows.any():
                share = weight[rows][:, e]
                mixed[rows] = share.reshape(-1, *[1] * (x[rows].dim() - 1)) * torch.tanh(expert(x[rows]))
        return self.readout(mixed.mean(1))


def networks(tokens: bool) -> tuple[nn.Module, nn.Module, richter.Probe]:
    """(now, initially, a probe): some examples have changed the expert."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        start = Routed(tokens).double()
        now = Routed(tokens).double()
    now.load_state_dict(start.state_dict())
    return moved(now, 0.4), start, richter.Probe(draw(16, 3, 4, seed=2), torch.arange(16) % 3)


@pytest.mark.parametrize("expert", ["experts.0", "experts.1"])
def test_what_is_asked_of_a_layer_that_is_not_reached_is_zero(expert: str) -> None:
    model, start, probe = networks(tokens=False)
    chosen = [m.gate(probe.x.mean(1)).argmax(-1) for m in (model, start)]
    assert {(0, 1), (1, 0), (0, 0), (1, 1)} == set(zip(chosen[0].tolist(), chosen[1].tolist(), strict=True))
    snap = richter.measure(model, probe, CENTRED, initial=state(start))
    W, _, J = oracles.layer_io(model, probe.x, expert)
    W0, _, J0 = oracles.layer_io(start, probe.x, expert)
    expected = oracles.nfa_measures(W, W0, J, J0)
    for measure in CENTRED:
        assert snap.value(measure, expert) == pytest.approx(expected[measure], rel=1e-8)
        assert math.isfinite(snap.error(measure, expert))


def test_other_tokens_cannot_be_subtracted() -> None:
    model, start, probe = networks(tokens=True)
    snap = richter.measure(model, probe, CENTRED, initial=state(start))
    for measure in CENTRED[:3]:
        row = snap.row(measure, "experts.0")
        assert math.isnan(row.value)
        assert row.mark is Mark.UNDEFINED
        assert "sends other positions of some examples" in row.note
    assert math.isfinite(snap.value("cnfc", "experts.0"))
    assert math.isfinite(snap.value("double_centred_nfc", "gate"))
