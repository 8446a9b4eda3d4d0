"""Claims of the signal paper on results made by hand, of which it is known what is true."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from richter import experiments
from richter.experiments.frame import Experiment, Results
from richter.experiments.running import Finding, finding
from richter.theory import signal

Arrays = Mapping[str, Any]


def made(e: Experiment, arrays: Callable[[Any], Arrays], **changes: Any) -> Results:
    settings = e.settings("smoke", seeds=tuple(range(6)), **changes)
    tasks = list(e.tasks(settings))
    return Results(settings, tasks, [{k: np.asarray(v) for k, v in arrays(t).items()} for t in tasks])


def judged(e: Experiment, words: str, r: Results) -> tuple[Finding, list[Finding]]:
    """The claim with these words, and its controls, which change only what is read."""
    (c,) = [c for c in e.claims if words in c.text]
    read = {k.text: Results(replace(r.settings, **k.changes), r.tasks, r._returned) for k in c.rivals}
    return finding(c, r), [finding(c, read[k.text], control=k) for k in c.rivals]


def swept(layer: Callable[[int, str], float]) -> Callable[[Any], Arrays]:
    """Networks whose alignment grew tenfold in one layer; less, and nowhere in particular, on shuffled labels."""
    def arrays(t: Any) -> Arrays:
        A = np.full(t.depth, 0.01)
        grown = A.copy()
        grown[round(layer(t.depth, t.condition)) - 1] = 0.1 if t.labels == "own" else 0.011
        return {"initial": A, "profile": grown, "accuracy": 0.8 - 0.1 * (t.condition != "base"), "untrained": 0.1}
    return arrays


SWEEP = experiments.get("signal_fig3")
DEPTHS = {"depths": (10, 30, 100, 300, 1000)}


def test_a_peak_that_follows_the_balanced_layer() -> None:
    r = made(SWEEP, swept(lambda depth, _: signal.balanced_layer(depth)), **DEPTHS)
    for words in ("misfit of C times the balanced layer", "growth of the best layer's alignment, smallest over depths"):
        claim, rivals = judged(SWEEP, words, r)
        assert claim.value in claim.claim.expect
        assert not any(f.holds or f.invalid for f in rivals)
    slope, rivals = judged(SWEEP, "slope of the log", r)
    assert slope.value == pytest.approx(signal.exponent(DEPTHS["depths"]), abs=0.02)
    assert rivals[0].value == 0


def test_a_peak_in_proportion_to_the_depth_is_no_balanced_layer() -> None:
    r = made(SWEEP, swept(lambda depth, _: depth / 2), **DEPTHS)
    assert judged(SWEEP, "misfit of C times the balanced layer", r)[0].value > 0
    assert judged(SWEEP, "slope of the log", r)[0].value == pytest.approx(1)
    assert judged(SWEEP, "that layer lies deeper", r)[0].value == 10


def test_shifts_of_the_peak() -> None:
    r = made(SWEEP, swept(lambda depth, condition: depth / 5 * (2 if condition == "slow" else 1)))
    slow, (untrained,) = judged(SWEEP, "a quarter of the learning rate: log", r)
    assert slow.value == pytest.approx(np.log(2))
    assert untrained.value == 0
    assert judged(SWEEP, "batches of 512: log", r)[0].value == 0
    lost, (exchanged,) = judged(SWEEP, "a quarter of the learning rate: test accuracy lost", r)
    assert lost.value == pytest.approx(0.1) == -exchanged.value
    assert judged(SWEEP, "Table 3: ", r)[0].value == pytest.approx(0.97 - 0.8)


def test_the_hierarchy_is_of_trained_networks() -> None:
    e = experiments.get("signal_fig2")

    def arrays(t: Any) -> Arrays:
        A = np.tile(np.full(t.depth, 0.01), (4, 1))
        if t.labels == "own":
            A[1:, t.depth // 2], A[3, -1] = [0.03, 0.05, 0.07], 0.02
        return {"epochs": [0, 1, 3, 10], "alignment": A, "losses": [2.0, 1, 1, 1], "accuracy": 0.8}

    r = made(e, arrays)
    for words, number in (("20 layers, CIFAR-10: growth of the best", 7),
                          ("20 layers, Fashion-MNIST: growth of the last layer", 1 / 6), ("CIFAR-10, rate 0.05: share", 4 / 6)):
        claim, rivals = judged(e, words, r)
        assert claim.value == pytest.approx(number)
        assert not any(f.holds or f.invalid for f in rivals)


def test_frozen_networks() -> None:
    e = experiments.get("signal_fig18")

    def arrays(t: Any) -> Arrays:
        after = np.full(10, 0.01)
        after[0 if t.noise == 1 else 4] = 0.03
        out = {"test": 0.9 + 0.05 * (t.width > 300), "train": 1.0, "untrained": 0.1}
        return {**out, "before": np.full(10, 0.01), "after": after} if t.measured else out

    r = made(e, arrays)
    for words, number in (("largest growth of a hidden", 3), ("nearer to the centre", 4), ("wide network less", 0.05)):
        claim, rivals = judged(e, words, r)
        assert claim.value == pytest.approx(number)
        assert not any(f.holds or f.invalid for f in rivals)


def test_layer_by_layer_against_its_rivals() -> None:
    e = experiments.get("signal_alg1")
    level = {"printed": 0.9, "cosine": 0.92, "end": 0.95, "frozen": 0.7, "shuffled": 0.1}

    def arrays(t: Any) -> Arrays:
        peaked = {"end": [0.05, 0.1, 0.2, 0.1, 0.02], "frozen": [0.1, 0.06, 0.04, 0.02, 0.01]}
        flat = np.array(peaked.get(t.method, [0.1, 0.1, 0.1, 0.1, 0.02]))
        return {"accuracy": level[t.method] / (1 if t.data == "mnist_5k" else 2), "features": np.full(4, level[t.method] - 0.1),
                "profile": flat}

    r = made(e, arrays)
    for words, number in (("test accuracy, as printed", 0.9), ("cosine kernel and target 1", 0.92), ("smallest over hidden", 0.8),
                          ("MNIST-5k: test accuracy less", -0.05), ("layers within a tenth", 4), ("largest alignment over", 0.5),
                          ("CIFAR-10: test accuracy less", -0.025)):
        claim, rivals = judged(e, words, r)
        assert claim.value == pytest.approx(number)
        assert not any(f.holds or f.invalid for f in rivals)
