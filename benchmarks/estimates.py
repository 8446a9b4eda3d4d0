"""How far estimates are from what they estimate, and what they save: nfc from random outputs on a small GPT, tangent_cka from
compressed gradients on the same, at initialisation and trained; every sketched measure beside the same of all gradients."""

from __future__ import annotations

import argparse
import inspect
import math
from collections import Counter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import richter
import richter.linalg
from richter.core import Mark
from richter.instrument.cotangents import every_output, random_outputs
from richter.models import GPT

OUTPUTS = 10


def text(n: int, context: int, vocabulary: int) -> Tensor:
    """Pieces of a real text, one id for each character: the source of a module that everybody has."""
    source = inspect.getsource(argparse)
    common = [c for c, _ in Counter(source).most_common(vocabulary - 1)]
    ids = torch.tensor([common.index(c) if c in common else vocabulary - 1 for c in source])
    starts = torch.randint(len(ids) - context - 1, (n,), generator=torch.Generator().manual_seed(0))
    return torch.stack([ids[i:i + context + 1] for i in starts])


def trained(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> nn.Module:
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(model(x).flatten(0, -2), y.flatten()).backward()
        optimiser.step()
    return model


def sketches(seeds: int) -> None:
    ids = text(256, 16, 65)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model = trained(GPT(65, 16, d=64, depth=2), x, y, 100)
    probe = richter.Probe(x, y)
    exact = richter.measure(model, probe, ["nfc"], cotangents=lambda f, t: every_output(f))  # under no name: never sketched
    layers = [r.layer for r in exact.rows if not r.note.startswith("trivial")]
    drawn = [richter.measure(model, probe, ["nfc"], cotangents=random_outputs(64, seed)) for seed in range(seeds)]
    off = torch.tensor([[s.value("nfc", k) / exact.value("nfc", k) - 1 for k in layers] for s in drawn])
    far = torch.tensor([[abs(s.value("nfc", k) - exact.value("nfc", k)) / s.error("nfc", k) for k in layers] for s in drawn])
    one, two = ((far <= width).double().mean(0) for width in (1, 2))
    print(f"GPT, 16 x 65 = 1,040 outputs, nfc from 64 random outputs, {seeds} seeds, {len(layers)} layers: rms error at most "
          f"{off.square().mean(0).sqrt().max():.2%} in a layer, worst of all {off.abs().max():.2%}; the exact value is within "
          f"one stated standard error in {one.min():.0%} to {one.max():.0%} of the seeds ({one.mean():.0%} over layers), within "
          f"two in {two.min():.0%} to {two.max():.0%}")


SKETCHED = ("nfc", "cnfc", "c_uc_ratio", "tangent_cka", "tangent_alignment", "tangent_stable_rank", "tangent_correlation")


def exact_tangents(model: nn.Module, x: Tensor, Y: Tensor) -> dict[tuple[str, str], float]:
    """Tangent measures of every module and of the whole model from all gradients: one backward pass for each output."""
    n, k = Y.shape
    weights = {name: p.detach() for name, p in model.named_parameters()}
    parts: dict[str, list[Tensor]] = {name: [] for name in weights}
    for i in range(n):
        _, pull = torch.func.vjp(lambda w, i=i: torch.func.functional_call(model, w, (x[i:i + 1],)).reshape(-1), weights)
        for name, J in torch.func.vmap(lambda e, pull=pull: pull(e)[0], chunk_size=k)(torch.eye(k)).items():
            parts[name].append(J.reshape(k, -1))
    y, known = (Y - Y.mean()).reshape(-1).double(), {}
    whole, single = torch.zeros(n * k, n * k), torch.zeros(k, n, n)
    for module in dict.fromkeys(name.rpartition(".")[0] for name in weights):
        J = torch.cat([torch.cat(parts.pop(name)) for name in list(parts) if name.rpartition(".")[0] == module], 1)
        rows = J.view(n, k, -1).transpose(0, 1)
        own = rows @ rows.mT
        whole, single = torch.addmm(whole, J, J.T), single + own
        C = (J - J.mean(0)).double()
        known |= _measures(module, torch.linalg.eigvalsh(C.T @ C), (C.T @ y).square().sum().item(), y, own, Y)
    rows = whole.mean(0)
    centred = whole.sub_(rows).sub_(rows[:, None]).add_(rows.mean())
    top = richter.linalg.leading(centred, most=1).value
    rest = (centred.square().sum(dtype=torch.float64) - top ** 2).clamp(min=0).sqrt()
    return known | _measures("*", torch.stack([rest, torch.tensor(top).double()]), (y @ (centred @ y.float()).double()).item(), y,
                             single, Y)


def _measures(layer: str, spectrum: Tensor, quadratic: float, y: Tensor, own: Tensor, Y: Tensor) -> dict[tuple[str, str], float]:
    """``spectrum``: numbers with the same sum of squares and the same largest as the eigenvalues."""
    norm, top, energy = spectrum.norm().item(), spectrum[-1].item(), (y @ y).item()
    labels, K = Y.T.double(), own.double()
    there = labels.square().sum(1) > 0
    aligned = torch.einsum("cn,cnm,cm->c", labels, K, labels) / (K.flatten(1).norm(dim=1) * labels.square().sum(1))
    return {("tangent_cka", layer): quadratic / norm / energy, ("tangent_stable_rank", layer): (norm / top) ** 2,
            ("tangent_correlation", layer): quadratic / top / energy, ("tangent_alignment", layer): aligned[there].mean().item()}


def coverages(seeds: range, steps: int) -> list[bool]:
    """How often the exact value lies within one standard error of the sketch alone, by measure and layer."""
    context, vocabulary = 8, 65
    ids = text(16, context, vocabulary)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model = GPT(vocabulary, context, d=24, depth=2)
    start = {k: p.clone() for k, p in model.state_dict().items()}
    model = trained(model, x, y, steps)
    probe = richter.Probe(x, y)
    names = [m for m in SKETCHED if steps or m not in ("cnfc", "c_uc_ratio")]  # before a step nothing has moved
    exact = exact_tangents(model, x, F.one_hot(y, vocabulary).float().flatten(1))
    every = richter.measure(model, probe, names[:1 if not steps else 3], initial=start, cotangents=lambda f, t: every_output(f))
    exact |= {(r.measure, r.layer): r.value for r in every.rows if r.mark is not Mark.TRIVIAL}
    within: dict[tuple[str, str], list[bool]] = {}
    silent: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        for r in richter.measure(model, probe, names, initial=start, cotangents=random_outputs(64, seed)).rows:
            place = (r.measure, r.layer)
            if place in exact and math.isfinite(r.value):
                stated = float(r.note.rpartition("sketch error ")[2].partition(",")[0])
                within.setdefault(place, []).append(abs(r.value - exact[place]) <= stated)
            elif place in exact:
                silent[place] += 1
    for name in names:
        shares = {layer: sum(w) / len(w) for (m, layer), w in within.items() if m == name}
        hits = [hit for (m, _), w in within.items() if m == name for hit in w]
        unsaid = {layer: count for (m, layer), count in silent.items() if m == name}
        print(f"GPT after {steps} steps, {name}: one standard error of the sketch covers the exact value in "
              f"{sum(hits) / len(hits):.0%} of {len(shares)} layers and {len(seeds)} seeds, by layer "
              f"{', '.join(f'{layer} {share:.0%}' for layer, share in shares.items())}"
              + (f"; without a number: {unsaid}" if unsaid else ""), flush=True)
    return [hit for w in within.values() for hit in w]


def compressions(seeds: range, steps: int) -> None:
    """tangent_cka from gradients that are compressed, beside the same vectors' gradients as they are: how often the exact value
    lies within one standard error of the compression alone."""
    from unittest import mock

    from richter.instrument.evaluate import jackknife
    from richter.instrument.statistics import output_sketch as drawn
    from richter.instrument.statistics import sketches as estimates
    from richter.instrument.statistics.kernels import Estimate, Tangents
    ids = text(16, 16, 65)
    x, y = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
    model = trained(GPT(65, 16, d=64, depth=2), x, y, steps)
    probe = richter.Probe(x, y)
    within: dict[str, list[bool]] = {}
    for seed in seeds:
        known: list[dict[str, Estimate]] = []
        for compresses in (False, True):
            found: dict[str, Estimate] = {}

            def kept(t: Tangents, found: dict[str, Estimate] = found, make: object = estimates._sketch) -> object:
                found.update(make(t))  # type: ignore[operator]
                return iter(found.items())
            small = {1024: estimates.SIZES[1024]}  # so that the layers of a small network are compressed too
            with mock.patch.object(drawn.OutputSketch, "least", return_value=2 ** 62), \
                    mock.patch.multiple(estimates, _compresses=lambda t, c=compresses: c, _sketch=kept), \
                    mock.patch.object(estimates, "SIZES", small):
                richter.measure(model, probe, ["tangent_cka"], cotangents=random_outputs(64, seed))
            known.append(found)
        for layer, whole in known[0].items():
            mine = known[1][layer]
            error = jackknife([v.norm for v in mine.leaving["sketches"]])
            if error > 1e-6 * whole.value.norm:  # what is small, or a vocabulary's, is not compressed
                within.setdefault(layer, []).append(abs(mine.value.norm - whole.value.norm) <= error)
    shares = {layer: sum(w) / len(w) for layer, w in within.items()}
    pooled = sum(map(sum, within.values())) / sum(map(len, within.values()))
    print(f"GPT after {steps} steps, norms of kernels from gradients compressed to 6 x 1,024 numbers, seeds {seeds.start} to "
          f"{seeds.stop - 1}: one "
          f"standard error of the compression covers the value without it in {pooled:.0%} of {len(shares)} layers and seeds, "
          f"from {min(shares.values()):.0%} to {max(shares.values()):.0%} by layer: "
          f"{', '.join(f'{layer} {share:.0%}' for layer, share in shares.items())}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--first", type=int, default=1000, help="the first seed: what was chosen was on 0 to 139")
    parser.add_argument("--only", choices=["gpt", "coverage", "compressed"])
    asked = parser.parse_args()
    torch.manual_seed(0)
    if asked.only in (None, "gpt"):
        sketches(asked.seeds)
    if asked.only in (None, "coverage"):
        hits = [hit for steps in (0, 100) for hit in coverages(range(asked.first, asked.first + asked.seeds), steps)]
        print(f"all of these: {sum(hits) / len(hits):.1%}")
    if asked.only in (None, "compressed"):
        for steps in (0, 100):
            compressions(range(asked.first, asked.first + asked.seeds), steps)


if __name__ == "__main__":
    main()
