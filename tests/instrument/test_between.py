"""What an Observer keeps between snapshots holds for the model as it is now: each snapshot is what a new measurement finds."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import richter
from observing import draw
from richter.instrument.evaluate import RichterWarning
from richter.instrument.survey import settings

N = 40  # examples, of which a survey sees the first eight
MEASURES = (*richter.measures.DEFAULT, "effective_gamma")


class Net(nn.Module):
    """With attributes and buffers that change what it does, some with later examples only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.outputs, self.clip, self.mixing = 4, 100.0, 0.0
        self.register_buffer("shift", torch.zeros(N, 6), persistent=False)
        self.register_buffer("table", torch.zeros(N, 6))

    def forward(self, x: Tensor) -> Tensor:
        which, x = x[:, 0].long(), x[:, 1:].clamp(max=self.clip)
        h = torch.tanh(self.a(x)) + self.shift[which] + self.table[which]
        h = F.dropout(torch.tanh(self.b(h)), 0.2, self.training)
        return self.c(h + self.mixing * h.mean(0))[:, :self.outputs]


def transposed(model: Net) -> None:
    model.b.weight.data = model.b.weight.data.t()


def hooked(model: Net) -> None:
    model.b.register_full_backward_hook(lambda *_: None)


def clipped(model: Net) -> None:
    model.clip = 0.9  # none of the first examples is above


def fewer(model: Net) -> None:
    model.outputs = 3


def written(name: str) -> Callable[[Net], None]:
    def change(model: Net) -> None:
        getattr(model, name)[8:] = 3 * draw(N - 8, 6, seed=5)
    change.__name__ = name
    return change


def case() -> tuple[Net, richter.Probe]:
    torch.manual_seed(0)
    x = draw(N, 5, seed=1)
    x[:8] = x[:8].clamp(max=0.9)
    return Net().double(), richter.Probe(torch.cat([torch.arange(N)[:, None].double(), x], 1), torch.arange(N) % 3)


def moved(model: nn.Module, seed: int) -> None:
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.add_(0.1 * draw(*p.shape, seed=100 * seed + i))


def same(watch: richter.Observer, step: int) -> None:
    snap = watch(step)
    fresh = richter.measure(watch.model, watch.probe, watch.measures, initial=watch.initial)
    assert snap is not None
    for mine, other in zip(snap.rows, fresh.rows, strict=True):
        assert (mine.layer, mine.measure, mine.mark) == (other.layer, other.measure, other.mark)
        assert mine.value == pytest.approx(other.value, rel=1e-8, abs=1e-12, nan_ok=True), (mine, other)


@pytest.mark.parametrize("change", [transposed, hooked, clipped, fewer, written("shift"), written("table")],
                         ids=lambda change: change.__name__)
def test_what_changes_besides_weights_is_seen(change: Callable[[Net], None]) -> None:
    model, probe = case()
    watch = richter.Observer(model, probe, when=1, budget=None, on_error="raise", measures=MEASURES)
    for step in range(4):
        if step == 2:
            change(model)
        same(watch, step)
        moved(model, step)


def test_a_model_that_begins_to_mix_is_refused_with_dropout_too() -> None:
    model, probe = case()
    watch = richter.Observer(model, probe, when=1, budget=None, mode="train", measures=["nfc"])
    assert watch(0) is not None
    moved(model, 0)
    assert watch(1) is not None
    model.mixing = 0.5
    with pytest.warns(RichterWarning, match="mixes examples"):
        assert [watch(step) for step in (2, 3)] == [None, None]
    assert "MixingError" in watch.failures[0].reason


@pytest.mark.parametrize("dead", [False, True])
def test_dropout_that_does_not_show_in_the_outputs_is_no_mixing(dead: bool) -> None:
    """A head that was initialised with zeros, or a layer that has died: outputs are the same from pass to pass, gradients not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)).double()
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    with torch.no_grad():
        (model[3].bias.fill_(-100) if dead else model[5].weight.zero_())
    probe = richter.Probe(draw(N, 5, seed=1), torch.arange(N) % 3)
    for given in (None, initial):
        snap = richter.measure(model, probe, ["nfc", "probe_loss"], mode="train", initial=given)
        assert math.isfinite(snap.value("probe_loss"))


def test_a_norm_whose_eps_has_ruled_makes_scales_idle_afterwards() -> None:
    """That no scale was idle was found once, and kept."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 3)).double()
    watch = richter.Observer(model, richter.Probe(draw(N, 5, seed=1), torch.arange(N) % 3), when=1, budget=None, on_error="raise")
    same(watch, 0)
    moved(model, 0)
    for step, scale in ((1, 1e-4), (2, 1.5e4)):
        with torch.no_grad():
            for p in model[0].parameters():
                p.mul_(scale)
        same(watch, step)


def test_statistics_of_batches_that_were_frozen_at_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3)).double().eval()
    x, y = draw(128, 5, seed=1), draw(128, 5, seed=1)[:, :3].argmax(1)
    options = {"when": 1, "budget": None, "on_error": "raise", "measures": richter.measures.MOVEMENT}
    watch = richter.Observer(model, richter.Probe(x, y), **options)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.3, weight_decay=1e-2)
    for step in range(40):
        if step % 10 == 0:
            same(watch, step)
        model.train(step > 15)
        optimiser.zero_grad()
        F.cross_entropy(model(x[:64]), y[:64]).backward()
        optimiser.step()
        model.eval()


def test_settings_are_what_modules_keep_beside_weights() -> None:
    model, _ = case()
    model.scales, model.nothing, model.long = [1.0, float("nan")], None, list(range(100))
    model.fixed = torch.zeros(2)
    with torch.inference_mode():
        model.uncounted = torch.zeros(2)
    before = settings(model)
    assert before == settings(model)
    for change in (lambda: setattr(model, "clip", 3.0), lambda: model.scales.append(2.0), lambda: model.fixed.add_(1),
                   lambda: setattr(model.b, "word", "other")):
        change()
        assert settings(model) != before
        before = settings(model)
