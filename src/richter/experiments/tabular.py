"""Learners on tables: which tables, how their rows are cut, and each learner with a published grid and the same time to search.

What is done is here and what is claimed of it in rfm/tables.py: to word a claim anew runs nothing again."""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice, product
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from richter.core import RichterError
from richter.experiments.kit import Task, Writer
from richter.learners import Gaussian, Laplace, LaplaceL1, RFMClassifier, RFMRegressor
from richter.tasks import table_names, tables
from richter.tasks.tabular import same_tables

Array = NDArray[Any]
Rows = tuple[NDArray[np.intp], NDArray[np.intp]]  # numbers of those to fit and of those to judge
Setting = dict[str, Any]
TOO_FEW = ("o-ring",)  # 23 rows, 17 of them 0: a fifth of some training folds has nothing to choose by
KIN = {"treasury": "mortgage"}  # the same rows with another target: not in the other part
JUDGES = 3  # folds by which a setting is judged, where the method has no way of its own


def points(X: Array) -> NDArray[np.intp]:
    """The number of the distinct row that each row is a copy of."""
    return np.unique(X, axis=0, return_inverse=True)[1].reshape(-1)


def cut(X: Array, y: Array, folds: int, classify: bool, seed: int) -> list[Rows]:
    """Row numbers to fit and to judge, ``folds`` times. Copies of a row are never apart; classes are spread evenly."""
    from sklearn.model_selection import KFold, StratifiedKFold
    point = points(X)
    first = np.unique(point, return_index=True)[1]
    label = y[first]  # of one of the copies, where they differ
    splitter = (StratifiedKFold if classify else KFold)(folds, shuffle=True, random_state=seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a class rarer than the folds
        pairs = list(splitter.split(first[:, None], label))
    return [(np.flatnonzero(np.isin(point, fit)), np.flatnonzero(np.isin(point, judge))) for fit, judge in pairs]


def score(predicted: Array, y: Array, classify: bool) -> float:
    """Accuracy, or R2."""
    if classify:
        return float((predicted == y).mean())
    spread = float(((y - y.mean()) ** 2).sum())
    return 1 - float(((predicted - y) ** 2).sum()) / spread if spread > 0 else 0.0


class Xrfm:
    """xrfm, which stops by a validation set that it does not fit: the mean of five, each with another fifth for validation, so
    that all rows are fitted. To be judged one of them is enough, by its own fifth."""

    def __init__(self, classify: bool, seed: int, **setting: Any) -> None:
        self.classify, self.seed, self.setting = classify, seed, setting

    def judged(self, X: Array, y: Array) -> float:
        """Score on one part of the rows after fitting to the others."""
        fit, judge = self._pairs(X, y)[0]
        self._learn(X, y, [(fit, judge)])
        return score(self.predict(X[judge]), y[judge], self.classify)

    def fit(self, X: Array, y: Array) -> Xrfm:
        return self._learn(X, y, self._pairs(X, y))

    def _pairs(self, X: Array, y: Array) -> list[Rows]:
        """Row numbers to fit and to validate; those of which the rows to fit have every class."""
        pairs = cut(X, y, 5, self.classify, self.seed)
        return [pair for pair in pairs if not self.classify or len(np.unique(y[pair[0]])) == len(np.unique(y))]

    def _learn(self, X: Array, y: Array, pairs: list[Rows]) -> Xrfm:
        self.classes: Array | None = None
        ids = y
        if self.classify:
            self.classes, ids = np.unique(y, return_inverse=True)
        x = torch.from_numpy(X).float()
        t = torch.from_numpy(ids) if self.classify else torch.from_numpy(y).float()[:, None]
        self.models = []
        for fit, judge in pairs:
            self.models.append(self._model())
            self.models[-1].fit(x[fit], t[fit], x[judge], t[judge])
        return self

    def _model(self) -> Any:
        try:
            from xrfm import xRFM
        except ImportError as why:
            raise RichterError("xrfm, to compare with, is not installed: pip install 'richter[peers]'.") from why
        fixed = {"get_agop_best_model": True, "return_best_params": True, "iters": 5, "early_stop_rfm": False}
        s = dict(self.setting)
        params = {"model": {"bandwidth_mode": "constant", **{k: v for k, v in s.items() if k != "reg"}},
                  "fit": {**fixed, "reg": s["reg"]}} if s else None
        return xRFM(device="cpu", tuning_metric="brier" if self.classify else "mse", verbose=False, random_state=self.seed,
                    rfm_params=params)

    def predict(self, X: Array) -> Array:
        x = torch.from_numpy(X).float()
        if self.classes is None:
            return np.mean([np.asarray(m.predict(x)).reshape(len(X)) for m in self.models], axis=0)
        return self.classes[np.mean([np.asarray(m.predict_proba(x)) for m in self.models], axis=0).argmax(1)]


def lightgbm(classify: bool, seed: int, **setting: Any) -> Any:
    """LightGBM with these settings."""
    try:
        from lightgbm import LGBMClassifier, LGBMRegressor
    except ImportError as why:
        raise RichterError("lightgbm, to compare with, is not installed: pip install 'richter[peers]'.") from why
    make = LGBMClassifier if classify else LGBMRegressor
    return make(random_state=seed, n_jobs=1, verbose=-1, deterministic=True, force_row_wise=True, **setting)


def forest(classify: bool, seed: int, **setting: Any) -> Any:
    """Random forest with these settings."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
    return (RandomForestClassifier if classify else RandomForestRegressor)(200, oob_score=True, random_state=seed, **setting)


def boosting(classify: bool, seed: int, **setting: Any) -> Any:
    """Gradient boosting with these settings."""
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
    make = HistGradientBoostingClassifier if classify else HistGradientBoostingRegressor
    return make(random_state=seed, early_stopping=False, **setting)


def network(classify: bool, seed: int, **setting: Any) -> Any:
    """Neural network with these settings."""
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    return (MLPClassifier if classify else MLPRegressor)(random_state=seed, **setting)


def rfm(classify: bool, seed: int, **setting: Any) -> Any:
    """Recursive feature machine with these settings."""
    return (RFMClassifier if classify else RFMRegressor)(random_state=seed, **setting)


def by_folds(model: Any, X: Array, y: Array, classify: bool, seed: int, most: int = JUDGES) -> float:
    """The score of rows left out, in ``most`` of a few folds."""
    predicted, rows = np.empty_like(y), np.zeros(len(y), bool)
    for fit, judge in cut(X, y, JUDGES, classify, seed)[:most]:
        predicted[judge] = model.fit(X[fit], y[fit]).predict(X[judge])
        rows[judge] = True
    return score(predicted[rows], y[rows], classify)


@dataclass(frozen=True)
class SearchCost:
    """Processor seconds that judging one setting takes: ``one`` (rows / 500)^b (columns / 10)^c outputs^e, and at least
    ``least``; outputs are the classes if there are more than two, else 1. ``again``: what the fit of all rows in the end takes,
    in the same unit. Measured on the tables that choices are made on, so that the number of settings tried follows from the
    table and not from how busy a machine is."""

    one: float = 1.0
    exponents: tuple[float, float, float] = (0.0, 0.0, 0.0)
    least: float = 0.0
    again: float = 1.0

    def settings(self, budget: float, X: Array, y: Array, classify: bool) -> int:
        """Number of settings that are tried in so many seconds, at least the first."""
        b, c, e = self.exponents
        classes = len(np.unique(y)) if classify else 1
        seconds = self.one * (len(X) / 500) ** b * (X.shape[1] / 10) ** c * (classes if classes > 2 else 1) ** e
        return max(1, int(budget / max(seconds, self.least) - self.again))


@dataclass(frozen=True)
class Method:
    """A learner, what may be chosen of it, how a setting is judged (a number that is larger for a better one), and its cost."""

    make: Callable[..., Any]
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    judge: Callable[[Any, Array, Array, bool, int], float] = by_folds
    cost: SearchCost = SearchCost()
    default: Setting = field(default_factory=dict)

    def settings(self, seed: int) -> Iterator[Setting]:
        """Yield the default setting, then the grid in a random order."""
        yield self.default
        choices = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        yield from (choices[i] for i in np.random.default_rng(seed).permutation(len(choices)))

    def fitted(self, X: Array, y: Array, classify: bool, seed: int, budget: float) -> tuple[Any, int]:
        """The best of the settings that the budget pays for, fitted to all rows; and how many these were."""
        count = self.cost.settings(budget, X, y, classify) if self.grid else 1
        tried = list(islice(self.settings(seed), count))
        marks = [self.judge(self.make(classify, seed, **s), X, y, classify, seed) for s in tried] if len(tried) > 1 else [0.0]
        return self.make(classify, seed, **tried[int(np.argmax(marks))]).fit(X, y), len(tried)


METHODS: dict[str, Method] = {
    "rfm": Method(rfm),
    "fact": Method(rfm, default={"features": "fact"}),
    "ridge": Method(rfm, default={"iterations": 0}),
    "chosen": Method(rfm, {"kernel": (Laplace(), LaplaceL1(), Gaussian()), "diagonal": (False, True),
                           "features": ("agop", "fact"), "power": (None, 0.25)},
                     lambda model, X, y, classify, seed: -model.fit(X, y).loss_, SearchCost(0.333, (1.69, 0.05, 0.06), 0.08)),
    "xrfm": Method(Xrfm, {"kernel": ("l2_high_dim", "l1", "l2"), "diag": (False, True), "exponent": (0.7, 1.0, 1.4),
                          "bandwidth": (1.0, 3.0, 10.0, 30.0), "reg": (1e-4, 1e-3, 1e-2, 1e-1, 1.0)},
                   lambda model, X, y, classify, seed: model.judged(X, y), SearchCost(0.141, (1.83, 0.48, 0.03), 0.02, again=5)),
    "forest": Method(forest, {"max_features": ("sqrt", 0.33, 0.67, 1.0), "min_samples_leaf": (1, 2, 5, 10)},
                     lambda model, X, y, classify, seed: model.fit(X, y).oob_score_, SearchCost(0.328, (0.31, 0.08, 0.01), 0.2)),
    "boosting": Method(boosting, {"learning_rate": (0.03, 0.1, 0.3), "max_iter": (50, 100, 300), "max_leaf_nodes": (7, 15, 31),
                                  "l2_regularization": (0.0, 1.0, 10.0), "min_samples_leaf": (5, 20)},
                       by_folds, SearchCost(0.324, (0.81, 0.36, 0.92), 0.15, again=0.5)),
    "lightgbm": Method(lightgbm, {"learning_rate": (0.03, 0.1, 0.3), "n_estimators": (50, 100, 300), "num_leaves": (7, 15, 31),
                                  "reg_lambda": (0.0, 1.0, 10.0), "min_child_samples": (5, 20)},
                       by_folds, SearchCost(0.05, (0.43, 0.37, 1.06), 0.025, again=0.5)),
    "network": Method(network, {"hidden_layer_sizes": ((128, 128), (256,), (64, 64, 64)), "alpha": (1e-4, 1e-2, 1.0),
                                "learning_rate_init": (1e-3, 3e-3, 1e-2)},
                      partial(by_folds, most=1), SearchCost(0.342, (0.92, -0.25, 0.17), 0.1, again=1.5),
                      {"hidden_layer_sizes": (128, 128)}),
}


def part(which: int) -> tuple[str, ...]:
    """The tables for choices of defaults (0), and those never looked at for them (1): within each kind every second one in the
    order of the digests of their names. Of copies the first is kept."""
    names: list[str] = []
    for kind in ("classification", "regression"):
        kept = [name for name in table_names(kind) if name not in TOO_FEW and name not in same_tables()]
        order = sorted(kept, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
        mine = order[which::2]
        names += [name for name in order if (KIN.get(name, name) in mine)]
    return tuple(names)


@dataclass(frozen=True)
class TabularSettings:
    """Evaluation on every table by ``folds`` outer folds, the same for all methods; copies of a row are never in two folds.
    Columns are standardised on the training rows. A method with a grid tries as many of its settings as ``budget`` seconds of
    the processor pay for, and is fitted again to all training rows with the best. RFM, FACT-RFM and kernel ridge regression
    with default settings search nothing but what ``fit`` chooses. Of larger tables ``rows`` are sampled."""

    sets: tuple[str, ...] = ()  # all of the second part
    methods: tuple[str, ...] = tuple(METHODS)
    folds: int = 2
    rows: int = 600
    budget: float = 1.0
    spoiled: tuple[str, ...] = ()  # methods that are given shuffled training labels
    plain: bool = False  # kernel ridge regression in RFM's place
    sharp: bool = False  # probabilities of RFM by a temperature ten times as high, without doubt
    seed: int = 0


def method_on_table(s: TabularSettings) -> list[Task[TabularSettings]]:
    """Return a task for each method on each table. ``change`` of a task: "spoiled", "plain", "sharp" or none."""
    def change(method: str) -> str:
        own = "plain" if s.plain else "sharp" if s.sharp else ""
        return "spoiled" if method in s.spoiled else own if method == "rfm" else ""
    rest = replace(s, sets=(), methods=(), spoiled=(), plain=False, sharp=False)
    return [Task(rest, table=table, method=method, change=change(method))
            for table in s.sets or part(1) for method in s.methods]


def whole(t: Task[TabularSettings]) -> tuple[Array, Array, bool]:
    """Return all rows of a table, or a sample of them, and whether it is a classification table."""
    data = tables(t.table, seed=t.settings.seed, standardise=False, dtype=torch.float64)
    X, y = torch.cat([data.x, data.x_test]).numpy()[:t.settings.rows], torch.cat([data.y, data.y_test]).numpy()[:t.settings.rows]
    return X, y if y.ndim == 1 else y[:, 0], y.ndim == 1


def work(t: Task[TabularSettings], run: Writer) -> Mapping[str, ArrayLike]:
    X, y, classify = whole(t)
    method = Method(rfm, default={"iterations": 0}) if t.change == "plain" else METHODS[t.method]
    parts = cut(X, y, t.settings.folds, classify, t.settings.seed)
    folds = [one_fold(t, method, X, y, classify, k, *rows) for k, rows in enumerate(parts)]
    run.progress(1.0)
    return {**{name: np.array([fold[name] for fold in folds]) for name in folds[0]}, "rows": len(X), "classify": classify}


def one_fold(t: Task[TabularSettings], method: Method, X: Array, y: Array, classify: bool, k: int, train: Array,
             test: Array) -> dict[str, float]:
    """The score on the rows of one fold, what it took, and the log loss beside that of the class frequencies."""
    mean, deviation = X[train].mean(0), X[train].std(0)
    x = (X - mean) / np.where(deviation > 0, deviation, 1)
    target = y if classify else (y - y[train].mean()) / (y[train].std() or 1)  # of deviation 1, for all methods alike
    labels = np.random.default_rng(k).permutation(target[train]) if t.change == "spoiled" else target[train]
    begun = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # 200 epochs are the network's, as it is shipped; constant columns; rare classes
        model, tried = method.fitted(x[train], labels, classify, t.settings.seed, t.settings.budget)
    seconds = time.process_time() - begun
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lightgbm was fitted without names of columns
        mark = score(model.predict(x[test]), target[test], classify)
    ours, base = log_losses(model, x[test], y[test], t.change == "sharp") if classify and method.make is rfm else (np.nan, np.nan)
    return {"score": mark, "seconds": seconds, "tried": tried, "log_loss": ours, "base_loss": base}


def log_losses(model: Any, X: Array, y: Array, sharp: bool) -> tuple[float, float]:
    """Log loss of the probabilities, and that of the class frequencies of the training rows, on new rows of a known class."""
    known = np.isin(y, model.classes_)
    column = np.searchsorted(model.classes_, y[known])
    if sharp:
        model.temperature_, model.doubt_ = 10 * model.temperature_, 0.0
    P = model.predict_proba(X[known])[np.arange(len(column)), column]
    return float(-np.log(np.maximum(P, 1e-300)).mean()), float(-np.log(model.class_frequencies_[column]).mean())


