"""Tables to compare learners on: which, how their rows are cut, and the same time to search for all."""

from __future__ import annotations

import dataclasses
import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from machines import normal, table
from richter import experiments, tasks
from richter.core import DataError
from richter.experiments import Results, Task
from richter.experiments.rfm.tables import OTHERS, SMALL, beats, doubt, gained, lead, ranks, surplus, won
from richter.experiments.running import finding
from richter.experiments.tabular import (
    KIN,
    METHODS,
    TOO_FEW,
    Method,
    SearchCost,
    TabularSettings,
    Xrfm,
    cut,
    part,
    points,
    score,
    work,
)
from richter.experiments.tabular import method_on_table as tasks_of
from richter.tasks.tabular import same_tables

PEERS = [name for name, method in METHODS.items() if method.grid]


@pytest.mark.parametrize("classify", [True, False])
def test_copies_of_a_row_are_in_one_fold(classify: bool) -> None:
    """Whoever knows a copy of a row knows its label."""
    r = np.random.default_rng(0)
    X = np.repeat(normal(60, 4).numpy(), 3, 0)[r.permutation(180)]
    label = {tuple(x): v for x, v in zip(X, r.integers(0, 2, 180), strict=True)}
    y = np.array([label[tuple(x)] for x in X])
    pairs = cut(X, y if classify else y + normal(180).numpy(), 3, classify, 0)
    assert sorted(np.concatenate([judge for _, judge in pairs])) == list(range(180))
    for fit, judge in pairs:
        assert not set(points(X)[fit]) & set(points(X)[judge])
        assert len(fit) + len(judge) == 180
        if classify:
            assert abs(y[fit].mean() - y.mean()) < 0.1


def test_the_parts_hold_every_table_once() -> None:
    first, second = part(0), part(1)
    assert same_tables() == {"medical_cost": "insurance"}
    assert not set(first) & set(second)
    assert {*first, *second, *TOO_FEW, *same_tables()} == set(tasks.table_names())
    assert abs(len(first) - len(second)) <= 2
    assert all((name in first) == (other in first) for name, other in KIN.items())
    assert set(SMALL) <= set(first)  # what is run every day is not what is claimed
    assert {t.table for t in tasks_of(TabularSettings())} == set(second)


@pytest.mark.long
def test_no_two_tables_hold_the_same_columns() -> None:
    """But copies, of which one is kept, and tables that are known to be kin, which are in one part."""
    owners: dict[str, set[str]] = {}
    for name in tasks.table_names():
        try:
            data = tasks.tables(name, standardise=False, dtype=torch.float64)
        except DataError:
            pytest.skip("the tables are not here")
        X = torch.cat([data.x, data.x_test]).numpy()
        for column in X.T:
            if len(np.unique(column)) > 30:
                owners.setdefault(hashlib.sha256(np.sort(column).tobytes()).hexdigest(), set()).add(name)
    shared = {frozenset(names) for names in owners.values() if len(names) > 1}
    assert shared == {frozenset(pair) for pair in [*same_tables().items(), *KIN.items()]}


@pytest.mark.parametrize("classify", [True, False])
@pytest.mark.parametrize("name", PEERS)
def test_a_method_searches_its_grid_and_is_fitted_to_all_rows(name: str, classify: bool) -> None:
    if name in ("xrfm", "lightgbm"):
        pytest.importorskip(name)
    X, y, labels = table()
    target = labels if classify else y
    method = METHODS[name]
    seen: list[int] = []

    class Spy:
        def __init__(self, *args: Any, **setting: Any) -> None:
            self.model = method.make(*args, **setting)

        def fit(self, X: np.ndarray, y: np.ndarray) -> Any:
            seen.append(len(X))
            return self.model.fit(X, y)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.model, name)

    cost = dataclasses.replace(method.cost, one=1.0, exponents=(0.0, 0.0, 0.0), least=0.0, again=0.0)
    model, tried = dataclasses.replace(method, make=Spy, cost=cost).fitted(X, target, classify, 0, 2.0)
    assert tried == 2
    assert seen[-1] == len(X)
    assert score(model.predict(X), target, classify) > 0.6


def test_the_time_to_search_is_the_same_for_all_and_the_same_on_every_machine() -> None:
    X, y = np.zeros((500, 10)), np.arange(500.0)
    assert SearchCost(0.1).settings(1.0, X, y, False) == 9  # and one fit of all rows
    assert SearchCost(0.1, again=5.0).settings(1.0, X, y, False) == 5
    assert SearchCost(0.1, (1.0, 0.0, 0.0)).settings(1.0, X[:250], y[:250], False) == 19
    assert SearchCost(0.1, (1.0, 0.0, 0.0), least=0.1).settings(1.0, X[:250], y[:250], False) == 9
    assert SearchCost(0.1, (0.0, 0.0, 1.0)).settings(1.0, X, np.arange(500) % 5, True) == 1
    assert SearchCost(5.0).settings(1.0, X, y, False) == 1
    for name in PEERS:
        settings = list(METHODS[name].settings(0))
        assert settings[0] == METHODS[name].default
        assert settings == list(METHODS[name].settings(0)) != list(METHODS[name].settings(1))


def test_xrfm_is_the_mean_of_five_that_fit_all_rows_between_them() -> None:
    pytest.importorskip("xrfm")
    X, y, labels = table()
    model = Xrfm(False, 0).fit(X, y)
    assert len(model.models) == 5
    alone = [np.asarray(m.predict(torch.from_numpy(X).float())).reshape(-1) for m in model.models]
    assert np.allclose(model.predict(X), np.mean(alone, 0))
    assert np.ptp(alone, axis=0).max() > 1e-3
    words = np.array(["a", "b", "c"])[labels]
    assert set(Xrfm(True, 0).fit(X, words).predict(X)) <= set(words)


def results(**scores: list[float]) -> Results:
    """One task for each method and table, of one fold."""
    s = TabularSettings(folds=1, rows=1)
    pairs = [(Task(s, table=str(i), method=m, change=""),
              {"score": np.array([v]), "classify": np.array(True), "seconds": np.array([1.0]),
               "log_loss": np.array([0.5 - v]), "base_loss": np.array([0.3])})
             for m, values in scores.items() for i, v in enumerate(values)]
    return Results(TabularSettings(), [t for t, _ in pairs], [f for _, f in pairs])


def test_ranks_and_tests_by_hand() -> None:
    others = {m: [0.1, 0.1, 0.1] for m in OTHERS}
    r = results(rfm=[0.9, 0.8, 0.2], ridge=[0.5, 0.8, 0.3], **others)
    assert ranks(r, ("rfm", "ridge")) == {"rfm": (1 + 1.5 + 2) / 3, "ridge": 1.5}
    assert lead(r, "rfm") == pytest.approx(0.0)
    assert [gained(r.where(table=i)) for i in "012"] == pytest.approx([0.4, 0.0, -0.1])
    assert [won(r.where(table=i)) for i in "012"] == [1.0, 0.5, 0.0]
    assert doubt(r, "rfm", "xrfm") == pytest.approx(1 / 8)
    assert doubt(r, "ridge", "ridge") == 1.0
    assert surplus(r) == pytest.approx(0.3 - (0.5 - 0.2))
    assert beats("xrfm")(r) == doubt(r, "rfm", "ridge") > doubt(r, "rfm", "xrfm")


def test_kernel_ridge_regression_in_the_place_of_rfm_passes_no_comparison() -> None:
    """It may well beat every other learner: then their comparison says nothing about a learned metric."""
    high, low = list(np.linspace(0.8, 0.95, 8)), list(np.linspace(0.5, 0.6, 8))
    plain = results(rfm=high, ridge=high, **dict.fromkeys(OTHERS, low))
    better = results(rfm=[v + 0.01 for v in high], ridge=high, **dict.fromkeys(OTHERS, low))
    assert all(doubt(plain, "rfm", other) < 0.05 for other in OTHERS)
    compared = [c for c in experiments.get("rfm_tables").claims if "RFM no better" in c.text or "ridge regression" in c.text]
    assert len(compared) == 4 + len(OTHERS)
    assert not any(finding(c, plain).holds for c in compared)
    assert all(finding(c, better).holds for c in compared)
    assert all(any(k.changes == {"plain": True} for k in c.rivals) for c in compared)


def test_tables_are_weighed_one_by_one() -> None:
    """Better on five tables of nine: so it is in the median, and by the interval over tables it may not be."""
    e = experiments.get("rfm_tables")
    gains = [0.1, 0.1, 0.1, 0.1, 0.1, -0.1, -0.1, -0.1, -0.1]
    r = results(rfm=[0.5 + g for g in gains], ridge=[0.5] * 9)
    verdicts = {c.text.partition(" ")[0]: finding(c, r).verdict for c in e.claims if c.over == "table"}
    assert verdicts == {"score": "holds on average", "tables": "holds on average"}


def test_a_part_says_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    X, _, labels = table()
    monkeypatch.setattr("richter.experiments.tabular.whole", lambda t: (X, labels, True))
    run: Any = SimpleNamespace(progress=lambda share: None)
    s = TabularSettings(folds=2, rows=60, budget=0.1)
    plain, spoiled, ridge, sharp = (work(Task(s, table="any", method="rfm", change=c), run) for c in
                                    ("", "spoiled", "plain", "sharp"))
    assert np.mean(plain["score"]) > np.mean(spoiled["score"])
    assert (plain["log_loss"] < plain["base_loss"]).all()  # type: ignore[operator]
    assert np.mean(sharp["log_loss"]) > np.mean(plain["log_loss"])
    assert np.array_equal(ridge["score"], work(Task(s, table="any", method="ridge", change=""), run)["score"])
    assert plain["tried"].tolist() == [1, 1]  # type: ignore[union-attr]


def test_to_word_a_claim_anew_runs_no_part_again() -> None:
    """What is claimed is in another file than what is done, and only the latter is in the key of a task."""
    e = experiments.get("rfm_tables")
    other = dataclasses.replace(e, claims=(dataclasses.replace(e.claims[0], value=lambda r: 0.0),))
    assert other.key != e.key
    assert other.task_key == e.task_key
    assert dataclasses.replace(e, work=lambda t, run: {}).task_key != e.task_key


def test_a_method_without_a_grid_is_taken_as_it_comes() -> None:
    X, y, _ = table()
    model, tried = Method(METHODS["rfm"].make, default={"iterations": 1}).fitted(X, y, False, 0, 100.0)
    assert (tried, model.iterations) == (1, 1)
