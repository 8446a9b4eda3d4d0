"""Standard errors are those of measuring again without each group of examples."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import richter
from observing import FEW, examples, heads, lengths, mlp, moved, probe, state
from richter import linalg


def left_out(values: list[float]) -> float:
    """sqrt((G-1)/G sum (v - mean)^2) over G values with one group left out each."""
    G, mean = len(values), sum(values) / len(values)
    return math.sqrt((G - 1) / G * sum((v - mean) ** 2 for v in values))


@pytest.mark.parametrize("n", [24, 21, 8, 5])
def test_errors_are_those_of_measuring_again_without_each_group(n: int) -> None:
    """Example i belongs to group i mod 8; nfc is left out over all examples, the kernel over its own."""
    x, y = examples(n)
    model, start, groups = moved(mlp()), state(mlp()), min(8, n)
    measures = ["nfc", "cnfc", "c_uc_ratio", "tangent_cka", "tangent_alignment", "tangent_stable_rank"]
    snap = richter.measure(model, richter.Probe(x, y), measures, initial=start)
    without = []
    for g in range(groups):
        rows = torch.arange(n) % groups != g
        without.append(richter.measure(model, richter.Probe(x[rows], y[rows]), measures, initial=start))
    for r in snap.rows:
        expected = left_out([s.value(r.measure, r.layer) for s in without])
        assert r.error == pytest.approx(expected, rel=1e-5, abs=1e-12), r
        assert r.error > 1e-6 or r.layer == "4"  # the read-out's K is the same for all examples


def test_errors_over_kernel_examples_leave_out_kernel_examples() -> None:
    x, y = examples(40)
    p = richter.Probe(x, y, kernel_examples=19)
    rows = p.kernel_rows()
    without = []
    for g in range(8):
        keep = rows[torch.arange(19) % 8 != g]
        without.append(richter.measure(mlp(), richter.Probe(x[keep], y[keep]), ["tangent_cka"]))
    snap = richter.measure(mlp(), p, ["tangent_cka"])
    for layer in ("0", "2", "4", "*"):
        expected = left_out([s.value("tangent_cka", layer) for s in without])
        assert snap.error("tangent_cka", layer) == pytest.approx(expected, rel=1e-6)


def test_errors_of_masked_tokens_leave_out_examples() -> None:
    model, x, y = heads(n=16)
    mask = lengths(16, 4)
    snap, without = richter.measure(model, richter.Probe(x, y, mask=mask), FEW), []
    for g in range(8):
        rows = torch.arange(16) % 8 != g
        without.append(richter.measure(model, richter.Probe(x[rows], y[rows], mask=mask[rows]), FEW))
    for m in FEW:
        expected = left_out([s.value(m, "first") for s in without])
        assert snap.error(m, "first") == pytest.approx(expected, rel=1e-6)


def test_errors_shrink_with_examples() -> None:
    small, large = (richter.measure(mlp(), probe(n, kernel_examples=2), ["nfc"]).error("nfc", "0") for n in (32, 2048))
    assert large < small / 3


def test_eigenvalues_are_computed_for_those_who_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alignment and its errors need none: they cost more than all the rest of a kernel."""
    counts = {"leading": 0, "top_of_each": 0}

    def counted(name: str) -> None:
        real = getattr(linalg, name)

        def call(*args: Any, **options: Any) -> Any:
            counts[name] += 1
            return real(*args, **options)
        monkeypatch.setattr(f"richter.instrument.statistics.kernels.{name}", call)

    for name in counts:
        counted(name)
    x, y = examples(24)
    alone = richter.measure(mlp(), richter.Probe(x, y), "tangent_cka")
    assert counts == {"leading": 0, "top_of_each": 0}
    both = richter.measure(mlp(), richter.Probe(x, y), ["tangent_cka", "tangent_stable_rank", "tangent_correlation"])
    assert counts == {"leading": 4, "top_of_each": 4}  # of three layers and the whole, for both measures that ask
    for layer in ("0", "2", "4", "*"):
        assert alone.value("tangent_cka", layer) == both.value("tangent_cka", layer)
        assert alone.error("tangent_cka", layer) == both.error("tangent_cka", layer) > 0
        assert both.error("tangent_stable_rank", layer) > 0


def wide(scale: float, n: int = 64) -> tuple[torch.nn.Module, dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """Layers and kernels of more rows than are computed in double precision throughout; outputs of this size."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(5, 170), torch.nn.Tanh(), torch.nn.Linear(170, 150), torch.nn.Tanh(),
                                    torch.nn.Linear(150, 3)).double()
    start = state(model)
    moved(model)
    with torch.no_grad():
        for name in ("4.weight", "4.bias"):
            model.get_parameter(name).mul_(scale)
            start[name] *= scale
    return model, start, *examples(n)


def assert_as_measured_again(model: torch.nn.Module, start: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor,
                             measures: list[str], rel: float) -> richter.Snapshot:
    snap = richter.measure(model, richter.Probe(x, y), measures, initial=start)
    without = [richter.measure(model, richter.Probe(x[rows], y[rows]), measures, initial=start)
               for rows in (torch.arange(len(x)) % 8 != g for g in range(8))]
    for r in snap.rows:
        expected = left_out([s.value(r.measure, r.layer) for s in without])
        assert r.error == pytest.approx(expected, rel=rel, abs=1e-12), r
    return snap


@pytest.mark.parametrize("scale", [1e-60, 1e-15, 1e-10, 1e-5, 1.0, 1e5, 1e15])
def test_errors_of_wide_layers_at_any_scale(scale: float) -> None:
    """Single precision has neither the range nor the digits to be trusted blindly."""
    assert_as_measured_again(*wide(scale), ["nfc", "cnfc", "c_uc_ratio", "tangent_cka", "tangent_alignment",
                                            "tangent_stable_rank", "tangent_correlation"], rel=0.01)


def test_errors_that_are_tiny() -> None:
    """Groups that are nearly the same are told apart all the same: examples of every group are copies, but for 1e-7."""
    model, start, x, y = wide(1.0)
    x, y = (t[:8].repeat_interleave(8, 0) for t in (x, y))
    x = x + 1e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(3), dtype=x.dtype)
    snap = assert_as_measured_again(model, start, x, y, ["nfc", "cnfc", "tangent_cka", "tangent_stable_rank"], rel=0.05)
    assert all(r.error < 1e-6 for r in snap.rows)
