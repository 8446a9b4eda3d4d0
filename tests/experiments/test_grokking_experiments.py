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
from richter.experiments.layerwise import fig6_4, fig6_5
from richter.experiments.running import finding
from richter.models import modular_transformer
from richter.report.drawing import faults
from richter.tasks import modular_arithmetic

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
                     "delay of (a) over the longest delay of (b) to (e)",
                     *(f"delay of (a) over that of ({name}), {fig6_5.TABLE[name][0]}" for name in fig6_5.KNOBS)}
    assert [c.text for c in FIFTH.claims if not holds(c, flat)] == ["(a): fall of kappa from the solved training set to the end"]


def test_a_training_set_that_is_never_solved_is_read_at_its_end() -> None:
    arrays = {"curves": np.array([[0.0, 0.1, 0.1], [1.0, 0.6, 0.5], [2.0, 0.9, 0.7]])}
    assert fig6_5.solved(arrays) == 2
    assert fig6_5.test_then(arrays) == 0.7
    assert fig6_5.good_at(arrays) == 2.0


def test_what_is_not_learned_yet_is_not_without_delay() -> None:
    epochs = np.arange(0, 101, 5.0)
    unsolved = {"curves": np.stack([epochs, rising(epochs, 20, 0.97), rising(epochs, 18, 0.9)], 1)}
    overfitted = {"curves": np.stack([epochs, rising(epochs, 20), np.full_like(epochs, 0.3)], 1)}
    soon = {"curves": np.stack([epochs, rising(epochs, 20), rising(epochs, 18, 0.9)], 1)}
    assert fig6_5.late(unsolved) == 100
    assert 60 < fig6_5.late(overfitted) < 80
    assert fig6_5.late(soon) == 0


# ------------------------------------------------------------------------------------------------ Fig. 6.3, Fig. 6.1

NETWORKS = {"rich": (0.08, 17.0, 0.97, 0.5, 0.07), "lazy": (0.57, 63.5, 0.92, 0.001, 0.6), "linear": (0.4, 63.0, 0.8, 0.0, 0.4),
            "random": (0.04, 35.0, 0.1, 0.9, 0.01)}  # kappa, D_eff, test accuracy, movement, kappa on training images


def networks(changed: Mapping[str, tuple[float, ...]] | None = None) -> Callable[[Any], Arrays]:
    def arrays(t: Any) -> Arrays:
        kappa, deff, accuracy, moved, inside = (NETWORKS | dict(changed or {}))[t.kind]
        return {"kappa_cka": kappa, "kappa_start": 0.55, "deff": deff, "deff_start": 63.0, "accuracy": accuracy, "moved": moved,
                "kappa_train": inside, "kappa_solved": kappa}
    return arrays


def test_rich_is_told_from_lazy_and_not_from_good() -> None:
    r = made(THIRD, networks())
    for c in THIRD.claims:
        assert holds(c, r) != bool(c.differs), c.text
        assert rivals_fail(c, r), c.text
    printed = made(THIRD, networks({"linear": (0.7, 63.0, 0.8, 0.0, 0.4)}))  # the linear model further in the extended regime
    assert all(holds(c, printed) for c in THIRD.claims)


@pytest.mark.parametrize(("changed", "words"), [
    ({"lazy": (0.2, 40.0, 0.92, 0.2, 0.2)}, ["targets / 100: kappa", "kappa with targets / 100 over that of plain training",
                                             "targets / 100: relative change of D_eff of the intensities"]),
    ({"random": (0.6, 60.0, 0.1, 0.9, 0.5)}, [
        "kappa of the two networks whose features moved least less that of the other two, at least",
        "random labels: kappa on the training images"])])
def test_what_is_not_so_is_seen(changed: Mapping[str, tuple[float, ...]], words: list[str]) -> None:
    r = made(THIRD, networks(changed))
    assert [c.text for c in THIRD.claims if not holds(c, r) and not c.differs] == words


# ------------------------------------------------------------------------------------------------ Fig. 6.4


def division(after: float = 0.08, late: float = 1500.0, meanwhile: float = 0.3) -> Callable[[Any], Arrays]:
    """Kappa is 0.24 when training is solved, ``meanwhile`` until the test accuracy rises, and ``after`` from then on."""
    steps = np.arange(0, 2001, 50.0)
    train, test = rising(steps, 40), rising(steps, late)
    known, overfitted = test >= 0.95, test <= 0.15
    first = np.arange(len(steps)) == np.argmax(train >= 0.99)
    kappa = np.select([first, overfitted], [0.24, meanwhile], after)
    return lambda t: {"step": steps, "train": train, "test": test, "kappa_cka": kappa, "kappa_all": kappa, "kappa_test": kappa,
                      "quality_top": np.where(known, 0.95, 0.5), "quality_all": np.where(known, 0.92, 0.3),
                      "deff_intensity": np.where(known, 21.0, 29.0), "deff_utilisation": np.where(known, 25.0, 30.0)}


def test_the_transformer_before_and_after() -> None:
    r = made(FOURTH, division())
    for c in FOURTH.claims:
        assert finding(c, r).value in c.expect, c.text
        assert rivals_fail(c, r), c.text
    many = made(FOURTH, division(after=0.3))
    assert [c.text for c in FOURTH.claims if finding(c, many).value not in c.expect] == [
        f"kappa after, on {pairs} pairs" for pairs in ("training", "all", "test")]
    early = made(FOURTH, division(meanwhile=0.1))
    assert [c.text for c in FOURTH.claims if finding(c, early).value not in c.expect] == [
        "kappa on all pairs while only the training pairs are known, median over steps"]
    never = made(FOURTH, division(late=1e6))
    assert "best test accuracy by step 3,000" in [c.text for c in FOURTH.claims if finding(c, never).value not in c.expect]
    assert Interval(high=150) in [c.expect for c in FOURTH.claims]


def test_looks_at_which_the_pairs_are_known() -> None:
    assert fig6_4.moments([0.1, 1.0, 0.5, 1.0, 1.0], [0.1, 0.1, 0.2, 0.99, 0.5]) == (1, 3)
    assert fig6_4.moments([0.1, 1.0, 1.0], [1.0, 0.1, 0.2]) == (1, 2), "never after training: the last look"
    assert fig6_4.moments([0.1, 0.9, 0.9], [1.0, 1.0, 0.2]) == (2, 2), "training is not solved: the last look, for both"


class Unwritten:
    """A run that is not kept."""

    def scalars(self, *_: Any, **__: Any) -> None: ...

    def progress(self, *_: Any) -> None: ...


def test_the_transformer_is_looked_at_on_training_test_and_all_pairs() -> None:
    run: Any = Unwritten()
    s = FOURTH.settings("smoke", p=7, d=8, steps=20, every=10, seeds=(0, 1))
    trainings = list(FOURTH.tasks(s))
    rows = [{k: np.asarray(v) for k, v in fig6_4.work(t, run).items()} for t in trainings]
    assert rows[0]["step"].tolist() == [0, 10, 20]
    assert rows[0]["quality"].shape == (3, 8)
    assert len({rows[0][name][-1] for name in ("kappa_cka", "kappa_all", "kappa_test")}) == 3, "three samples"
    model, data = modular_transformer(7, 8, seed=0), modular_arithmetic(7, 0, operation="divide", share=0.75)
    first = fig6_4.features(model, data.tokens_test, data.labels_test, 7)
    assert rows[0]["kappa_test"][0] == first.kappa_cka
    for tasks in (trainings[:1], trainings):
        figure = fig6_4.draw(Results(s, tasks, rows[:len(tasks)]))
        assert faults(figure) == []
        caption, = (text.get_text() for text in figure.texts if text.get_gid() == "caption")
        assert ("One seed." if len(tasks) == 1 else "of 2 seeds.") in caption.replace("\n", " ")
