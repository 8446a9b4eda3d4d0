"""What the claims about lazy, rich and late networks read out of results that are made by hand: they hold where the picture of
the thesis is there, and not where it is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from richter import experiments
from richter.core import Interval
from richter.experiments.frame import Claim, Experiment, Results
from richter.experiments.layerwise import fig6_5
from richter.experiments.running import finding

Arrays = Mapping[str, Any]
THIRD, FOURTH, FIFTH = (experiments.get(f"layerwise_fig6_{k}") for k in (3, 4, 5))


def made(e: Experiment, arrays: Callable[[Any], Arrays], **changes: Any) -> Results:
    settings = e.settings("smoke", seeds=tuple(range(6)), **changes)
    tasks = list(e.tasks(settings))
    return Results(settings, tasks, [{k: np.asarray(v) for k, v in arrays(t).items()} for t in tasks])


def holds(c: Claim, r: Results) -> bool:
    return finding(c, r).holds


def rivals_fail(c: Claim, r: Results) -> bool:
    read = (finding(c, Results(replace(r.settings, **rival.changes), r.tasks, r._returned), control=rival) for rival in c.rivals)
    return not any(f.holds or f.invalid for f in read)


def rising(epochs: np.ndarray, middle: float, high: float = 1.0) -> np.ndarray:
    return 0.1 + (high - 0.1) / (1 + np.exp(-(epochs - middle) / (0.1 * middle)))


# ------------------------------------------------------------------------------------------------ Fig. 6.5, Table 6.1


def grokking(late: float = 1200.0, kappa: float = 0.4) -> Callable[[Any], Arrays]:
    def arrays(t: Any) -> Arrays:
        epochs = np.arange(0, 2001, 5.0) if t.setting == "a" else np.arange(0, 101, 1.0)
        test = rising(epochs, late, 0.92) if t.setting == "a" else rising(epochs, 18, 0.9)
        ends = (0.8, kappa) if t.setting == "a" else (0.3, 0.3)
        return {"curves": np.stack([epochs, rising(epochs, 20), test], 1),
                "features": [(1.0, 0.7, 50.0), (30.0, ends[0], 50.0), (epochs[-1], ends[1], 20.0)]}
    return arrays


def test_the_settings_are_those_of_the_table() -> None:
    rows = {name: (k.weight, k.target, k.input, k.output, k.zero) for name, (_, k) in fig6_5.TABLE.items()}
    assert rows == {"a": (5, 3, 1, 1, False), "b": (1, 3, 1, 1, False), "c": (5, 30, 1, 1, False), "d": (5, 3, 0.01, 1, False),
                    "e": (5, 3, 1, 0.1, False)}


def test_late_generalisation_is_told_from_none() -> None:
    r = made(FIFTH, grokking())
    for c in FIFTH.claims:
        assert holds(c, r), c.text
        assert rivals_fail(c, r), c.text
    together, flat = made(FIFTH, grokking(late=25.0)), made(FIFTH, grokking(kappa=0.75))
    wrong = {c.text for c in FIFTH.claims if not holds(c, together)}
    assert wrong == {"(a): test accuracy when the training accuracy is 0.99", "(a): first epoch with a test accuracy above 0.8",
                     "delay of (a) over the longest delay of (b) to (e)"}
    assert [c.text for c in FIFTH.claims if not holds(c, flat)] == ["(a): fall of kappa from the solved training set to the end"]


def test_a_training_set_that_is_never_solved_is_read_at_its_end() -> None:
    arrays = {"curves": np.array([[0.0, 0.1, 0.1], [1.0, 0.6, 0.5], [2.0, 0.9, 0.7]])}
    assert fig6_5.solved(arrays) == 2
    assert fig6_5.test_then(arrays) == 0.7
    assert fig6_5.good_at(arrays) == 2.0


# ------------------------------------------------------------------------------------------------ Fig. 6.3, Fig. 6.1

NETWORKS = {"rich": (0.08, 17.0, 0.97, 0.5, 0.07), "lazy": (0.57, 63.5, 0.92, 0.001, 0.6), "linear": (0.4, 63.0, 0.8, 0.0, 0.4),
            "random": (0.04, 35.0, 0.1, 0.9, 0.01)}  # kappa, D_eff, test accuracy, movement, kappa on training images


def networks(changed: Mapping[str, tuple[float, ...]] | None = None) -> Callable[[Any], Arrays]:
    def arrays(t: Any) -> Arrays:
        kappa, deff, accuracy, moved, inside = (NETWORKS | dict(changed or {}))[t.kind]
        return {"kappa": kappa, "kappa_start": 0.55, "deff": deff, "deff_start": 63.0, "accuracy": accuracy, "moved": moved,
                "kappa_train": inside}
    return arrays


def test_rich_is_told_from_lazy_and_not_from_good() -> None:
    r = made(THIRD, networks())
    for c in THIRD.claims:
        assert holds(c, r), c.text
        assert rivals_fail(c, r), c.text


@pytest.mark.parametrize(("changed", "words"), [
    ({"lazy": (0.2, 40.0, 0.92, 0.2, 0.2)}, ["targets / 100: kappa", "kappa with targets / 100 over that of plain training",
                                             "targets / 100: relative change of D_eff of the intensities"]),
    ({"random": (0.6, 60.0, 0.1, 0.9, 0.5)}, [
        "kappa of the two networks whose features moved least less that of the other two, at least",
        "random labels: kappa on the training images"])])
def test_what_is_not_so_is_seen(changed: Mapping[str, tuple[float, ...]], words: list[str]) -> None:
    r = made(THIRD, networks(changed))
    assert [c.text for c in THIRD.claims if not holds(c, r)] == words


# ------------------------------------------------------------------------------------------------ Fig. 6.4


def division(after: float = 0.08, late: float = 1500.0) -> Callable[[Any], Arrays]:
    steps = np.arange(0, 2001, 50.0)
    numbers = np.full((len(steps), 7), 0.5)
    return lambda t: {"curves": np.column_stack([steps, rising(steps, 40), rising(steps, late), numbers]),
                      "before_kappa_cka": 0.24, "after_kappa_cka": after, "before_kappa_all": 0.25,
                      "after_kappa_all": 0.09, "before_quality_top": 0.5, "after_quality_top": 0.95,
                      "before_deff_intensity": 29.0, "after_deff_intensity": 21.0}


def test_the_transformer_before_and_after() -> None:
    r = made(FOURTH, division())
    for c in FOURTH.claims:
        assert finding(c, r).value in c.expect, c.text
        assert rivals_fail(c, r), c.text
    many = made(FOURTH, division(after=0.3))
    assert [c.text for c in FOURTH.claims if finding(c, many).value not in c.expect] == ["kappa after, on training pairs"]
    never = made(FOURTH, division(late=1e6))
    assert "best test accuracy by step 3,000" in [c.text for c in FOURTH.claims if finding(c, never).value not in c.expect]
    assert Interval(high=150) in [c.expect for c in FOURTH.claims]
