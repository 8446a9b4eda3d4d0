"""What the instrument says of a random model, beside the definition."""

from __future__ import annotations

import math
import random
import signal
import time
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import fuzz_models
import oracles
import richter
from richter.core import RichterError

RELATIVE = 1e-8
ENDLESS = 10  # seconds of computing, of which a model needs less than one
CORRELATIONS = ("nfc", "cnfc", "weight_change")
SILENT = "neither number nor note"
OPAQUE = ("(opaque)", "(computed)", "(vmap)", "(packed)", "(differentiated)")
# uses that an instrument cannot know to be linear maps, or not only that: a number may be missing, but not be wrong


@dataclass
class Outcome:
    """``wrong``, ``crashed`` and ``disturbed`` are failures; ``refused`` is the sentence of an error."""

    case: fuzz_models.Case
    wrong: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    disturbed: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    right: int = 0  # maps with all their correlations
    missing: dict[str, str] = field(default_factory=dict)  # map with a definable correlation -> note of the row, or what it was
    seconds: float = 0.0

    @property
    def silent(self) -> list[str]:
        """Maps that have neither a number nor a note."""
        return [name for name, note in self.missing.items() if note == SILENT]

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.crashed or self.disturbed or self.silent)

    def __str__(self) -> str:
        verdict = "FAILED" if self.failed else "refused" if self.refused else "right"
        lines = [self.case.text, f"  {verdict}: {self.right} maps right, {len(self.missing)} missing, {self.seconds:.2f} s"]
        for kind in ("wrong", "crashed", "disturbed", "refused"):
            lines += [f"  {kind.upper()}: {line}" for line in getattr(self, kind)]
        return "\n".join([*lines, *(f"  missing {name}: {note}" for name, note in self.missing.items())])


def called(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)


def close(a: Tensor, b: Tensor, relative: float = RELATIVE) -> bool:
    """In relative Frobenius distance; what should be zero may be so up to rounding."""
    return a.shape == b.shape and bool((a - b).norm() <= relative * b.norm() + 1e-13)


def mixes(case: fuzz_models.Case, J: dict[str, Tensor]) -> bool:
    """Does a batch give other outputs or gradients than its examples one by one? J[n,k,...] is of these."""
    model = case.fresh()
    f = called(model, case.x)
    f = (f if case.output is None else case.output(f)).flatten(1)
    copy = case.fresh()
    with torch.no_grad():
        single = torch.cat([oracles.outputs(copy, oracles.example(case.x, i), case.output) for i in range(len(f))])
    if not close(f.detach(), single, 1e-10):
        return True
    cotangents = torch.randn(f.shape, dtype=f.dtype, generator=torch.Generator().manual_seed(case.seed))
    (f * cotangents).sum().backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            expected = torch.einsum("nk,nk...->...", cotangents, J[name])
            if not close(torch.zeros_like(p) if p.grad is None else p.grad, expected, 1e-9):
                return True
    return False


# ------------------------------------------------------------------------------------------------------ nothing is changed


def frozen(value: Any) -> Any:
    """Something that can be compared bit by bit."""
    if isinstance(value, Tensor):
        return (str(value.dtype), tuple(value.shape), value.detach().numpy().tobytes(), value.requires_grad, value.is_leaf,
                frozen(value.grad) if value.is_leaf else None)
    if isinstance(value, np.ndarray):
        return value.tobytes()
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, (dict, Counter)):
        return [(k, frozen(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple, deque)):
        return [frozen(v) for v in value]
    if isinstance(value, SimpleNamespace):
        return frozen(vars(value))
    return value if isinstance(value, (int, float, str, bool, type(None))) else id(value)


def state(model: nn.Module, x: Any) -> dict[str, Any]:
    """Everything of a model, of its inputs and of the random streams that a measurement could change."""
    parts: dict[str, Any] = {"inputs": frozen(x), "torch's generator": frozen(torch.get_rng_state()),
                             "random": random.getstate(), "numpy.random": str(np.random.get_state()),  # noqa: NPY002
                             "gradients on": torch.is_grad_enabled()}
    for name, module in model.named_modules():
        parts |= {f"{name}.{key}": frozen(value) for key, value in vars(module).items() if key not in ("_modules",)}
    return parts


# -------------------------------------------------------------------------------------------------------- the comparison


def agree(got: dict[str, float], expected: dict[str, float]) -> bool:
    return all(math.isclose(got[m], v, rel_tol=RELATIVE, abs_tol=1e-13) for m, v in expected.items()
               if not math.isnan(got[m]) and not math.isnan(v))


def compare_correlations(outcome: Outcome, snap: richter.Snapshot, uses: list[oracles.Uses], twin: nn.Module,
                         then: nn.Module) -> None:
    """Every number is that of a use of this name; every use that has a correlation has a number or a note."""
    now, before = dict(twin.named_modules()), dict(then.named_modules())
    owners = first_owners(twin)
    expected = {}
    for use in uses:
        values = oracles.correlations(use.matrix(now[use.owner]), use.matrix(before[use.owner]), use.covariance)
        if not math.isnan(values["nfc"]):
            expected[use.owner, use.use] = values
    rows = {layer: {m: snap.value(m, layer) for m in CORRELATIONS} for layer in snap.layers
            if any(r.layer == layer and r.measure == "nfc" for r in snap.rows)}
    left = dict(expected)
    for layer, got in rows.items():
        if math.isnan(got["nfc"]):
            continue
        owner = (layer, "") if (layer, "") in expected else None
        if owner is None:  # a parameter, or a part of a module
            module = max((k for k in now if layer == k or layer.startswith(f"{k}.") or not k), key=len)
            mine = [key for key in left if owners.get(key[0], key[0]) == owners.get(module, module) or key[0] == module]
            if not mine:
                known = [key for key in expected if key[0] == module]
                if known or not is_norm(now[module]):
                    outcome.wrong.append(f"{layer}: nfc {got['nfc']:.6g}, but no such use has one ({known})")
                continue
            owner = next((key for key in mine if agree(got, expected[key])), mine[0])
        if agree(got, expected[owner]):
            if left.pop(owner, None) is not None:
                outcome.right += 1
        else:
            outcome.wrong.append(f"{layer}: " + ", ".join(
                f"{m} {got[m]:.9g} for {v:.9g}" for m, v in expected[owner].items() if not agree({m: got[m]}, {m: v})))
            left.pop(owner, None)
    for owner_name, use in left:
        if not any(word in use for word in OPAQUE):
            name = ".".join(filter(None, (owner_name, use)))
            outcome.missing[name] = note_on(snap, owner_name, use)


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def first_owners(model: nn.Module) -> dict[str, str]:
    """{module: the module that owns its weight by its first name}, where that is another one."""
    first: dict[int, str] = {}
    for name, p in model.named_parameters():
        first[id(p)] = name.rpartition(".")[0]
    return {name: first[id(m._parameters["weight"])] for name, m in model.named_modules()
            if m._parameters.get("weight") is not None and id(m._parameters["weight"]) in first}


def note_on(snap: richter.Snapshot, owner: str, use: str) -> str:
    """What is said of a map that has no number."""
    for r in snap.rows:
        if r.measure == "nfc" and math.isnan(r.value) and (r.layer == owner or r.layer.startswith(f"{owner}.{use}")):
            return r.note or "a row without a note"
    texts = [str(text) for layer, text in snap.notes.items() if layer == owner or layer.startswith(f"{owner}.")]
    return texts[0] if texts else SILENT


def examine(case: fuzz_models.Case) -> Outcome:
    """One model: measured, and by definition."""
    outcome, start = Outcome(case), time.perf_counter()
    twin, then = case.fresh(), case.fresh()
    J, uses = oracles.jacobian_and_uses(twin, case.x, case.output)
    mixing = mixes(case, J)
    if mixing and not case.mixes:
        raise AssertionError(f"the grammar is wrong: {case.text} mixes examples")
    then.load_state_dict(case.initial)
    with torch.no_grad():
        called(then, case.x)  # old weight norms compute their weight when they are called
        called(twin, case.x)
    before = state(case.model, case.x)
    snap, kernels = measure(outcome)
    after = state(case.model, case.x)
    outcome.disturbed += [key for key in before | after if before.get(key, "none") != after.get(key, "none")]
    if mixing:
        numbers = [r.layer for r in snap.rows if math.isfinite(r.value)] if snap else []
        outcome.wrong += [f"examples are mixed, and a snapshot has {len(numbers)} numbers"] if numbers else []
        outcome.wrong += ["examples are mixed, and there is a tangent kernel"] if kernels else []
        outcome.refused.clear()
    else:
        if snap:
            compare_correlations(outcome, snap, uses, twin, then)
        compare_kernels(outcome, kernels, oracles.kernels_of_modules(twin, J, J), snap)
    outcome.seconds = time.perf_counter() - start
    return outcome


@contextmanager
def not_endless() -> Iterator[None]:
    """TimeoutError after that much computing: it counts as a crash."""
    def stop(*_: Any) -> None:
        raise TimeoutError(f"still computing after {ENDLESS} s")
    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, ENDLESS, 1)  # again, where a generator that is being closed swallows it
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def measure(outcome: Outcome) -> tuple[richter.Snapshot | None, dict[str, Tensor] | None]:
    """Snapshot and kernels, or what was raised."""
    case, measures = outcome.case, [*CORRELATIONS, "tangent_cka"]
    snap = kernels = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            probe = richter.Probe(case.x, case.y, chunk=case.chunk, kernel_examples=None)
            with not_endless():
                snap = richter.measure(case.model, probe, measures, initial=case.initial, output=case.output)
        except RichterError as error:
            outcome.refused.append(f"measure: {type(error).__name__}: {error}")
        except Exception as error:
            outcome.crashed.append(f"measure: {type(error).__name__}: {str(error)[:300]}")
        try:
            with not_endless():
                kernels = richter.kernels.ntk(case.model, case.x, form=case.kernel, per_layer=True, output=case.output)
        except RichterError as error:
            outcome.refused.append(f"ntk: {type(error).__name__}: {error}")
        except Exception as error:
            outcome.crashed.append(f"ntk: {type(error).__name__}: {str(error)[:300]}")
    return snap, kernels


def compare_kernels(outcome: Outcome, got: dict[str, Tensor] | None, expected: dict[str, Tensor],
                    snap: richter.Snapshot | None) -> None:
    """Of every layer, and the alignment of the whole with the labels."""
    whole = torch.stack(list(expected.values())).sum(0)
    if got is not None:
        scale = whole.norm()
        for name, K in expected.items():
            K = oracles.reduce_outputs(K, outcome.case.kernel)
            if name not in got:
                outcome.wrong.append(f"kernel of {name!r}: missing")
            elif not bool((got[name] - K).norm() <= RELATIVE * K.norm() + 1e-14 * scale):
                outcome.wrong.append(f"kernel of {name!r}: {float((got[name] - K).norm() / K.norm()):.2g} off")
        outcome.wrong += [f"kernel of {name!r}: there is no such layer" for name in set(got) - set(expected)]
    if snap is not None:
        Y = outcome.case.y.flatten(1)
        for layer, K in {**expected, "*": whole}.items():
            rows = [r for r in snap.rows if r.measure == "tangent_cka" and r.layer == layer]
            cka = oracles.tangent_cka(K, Y) if K.norm() > 0 else math.nan
            flat = K.reshape(K.shape[0] * K.shape[1], -1)
            centred = flat - flat.mean(0) - flat.mean(1, keepdim=True) + flat.mean()
            rounding = 1e-14 * float(flat.norm() / (centred.norm() + 1e-300))  # what is left of a kernel that is almost constant
            for r in rows:
                if math.isfinite(r.value) and not math.isclose(r.value, cka, rel_tol=1e-7 + rounding, abs_tol=1e-10):
                    outcome.wrong.append(f"tangent_cka of {layer!r}: {r.value:.9g} for {cka:.9g}")
            if not math.isnan(cka) and not any(math.isfinite(r.value) or r.note for r in rows):
                outcome.wrong.append(f"tangent_cka of {layer!r}: neither number nor note")


# --------------------------------------------------------------------------------------------------------------- counting


@dataclass
class Tally:
    """Over many models."""

    outcomes: list[Outcome]

    @property
    def unmixed(self) -> list[Outcome]:
        return [o for o in self.outcomes if not o.case.mixes]

    @property
    def refused_maps(self) -> float:
        """Of all maps that have a correlation, in models that were measured."""
        right, missing = (sum(counts) for counts in ([o.right for o in self.outcomes], [len(o.missing) for o in self.outcomes]))
        return missing / max(1, right + missing)

    @property
    def refused_models(self) -> float:
        return sum(bool(o.refused) for o in self.unmixed) / max(1, len(self.unmixed))

    def __str__(self) -> str:
        words = ("wrong", "crashed", "disturbed", "silent", "refused")
        kinds = Counter(word for o in self.outcomes for word in words if getattr(o, word))
        notes = Counter(note for o in self.outcomes for note in (shape_of(n) for n in [*o.missing.values(), *o.refused]))
        clean = sum(not o.failed for o in self.outcomes)
        lines = [f"{len(self.outcomes)} models, {clean} right or refused; " + ", ".join(f"{v} {k}" for k, v in kinds.items()),
                 f"maps: {sum(o.right for o in self.outcomes)} right, refused {self.refused_maps:.1%}; "
                 f"models refused {self.refused_models:.1%}"]
        return "\n".join([*lines, *(f"{count:5d}  {note}" for note, count in notes.most_common(25))])


def shape_of(note: str) -> str:
    """A sentence without its names and numbers."""
    import re
    note = re.sub(r"'[^']*'", "'_'", note)
    return re.sub(r"[0-9.]+(e-?\d+)?", "#", note)[:150]


def main(arguments: Iterable[str]) -> None:
    """Seeds, ranges of them as 0:300, or names of blocks. Of ranges only failures are shown; all are counted."""
    outcomes = []
    for argument in arguments:
        low, colon, high = argument.partition(":")
        if low.isdigit():
            cases = (fuzz_models.build(seed) for seed in (range(int(low), int(high)) if colon else [int(low)]))
        else:
            cases = (fuzz_models.build(seed, compose=compose) for name, compose in fuzz_models.singles().items()
                     for seed in range(5) if argument == "singles" or name.startswith(argument))
            colon = colon or argument == "singles"
        for case in cases:
            outcome = examine(case)
            outcomes.append(outcome)
            if not colon or outcome.failed:
                print(outcome, flush=True)
    if len(outcomes) > 1:
        print(Tally(outcomes))
        print(f"{sum(o.seconds for o in outcomes) / len(outcomes):.2f} s for a model")
