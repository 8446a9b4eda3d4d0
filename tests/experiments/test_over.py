"""The tasks of an experiment from its settings: products, pairs, constant lists, lists by a function."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from richter.core import Ref, SelectionError
from richter.engine.sweep import name_of
from richter.experiments import running
from richter.experiments.kit import Experiment, Results, Task
from richter.runs.format import plain


@dataclass(frozen=True)
class OverSettings:
    n: int = 10
    depths: tuple[int, ...] = (2, 3)
    rates: tuple[float, ...] = (0.1, 0.2)
    spectra: tuple[str, ...] = ("flat", "steep")
    data: tuple[str, ...] = ("digits",)
    seeds: tuple[int, ...] = (0, 1)
    formula: str = "own"
    kinds: ClassVar = ("mlp", "cnn")


def work(t: Task[OverSettings], run: Any) -> dict[str, Any]:
    return {"value": t.settings.n * t.depth + t.seed}


def experiment(**changes: Any) -> Experiment:
    options: dict[str, Any] = {"over": ("depth", "seed")} | changes
    return Experiment(name="nfa_over", ref=Ref("nfa", "Fig. 0"), title="tasks", smoke=OverSettings(), paper=OverSettings(),
                      work=work, claims=(), **options)


def test_a_product_changes_its_last_field_first_and_leaves_the_values_out_of_the_settings() -> None:
    tasks = experiment().tasks(OverSettings(depths=(5, 2)))
    assert [(t.depth, t.seed) for t in tasks] == [(5, 0), (5, 1), (2, 0), (2, 1)]
    assert {t.settings for t in tasks} == {OverSettings(depths=(), seeds=())}


def test_fields_in_brackets_go_together_and_must_be_as_many(tmp_path: Path) -> None:
    e = experiment(over=(("depth", "rate"), "seed"))
    assert [(t.depth, t.rate, t.seed) for t in e.tasks(OverSettings(seeds=(4,)))] == [(2, 0.1, 4), (3, 0.2, 4)]
    with pytest.raises(SelectionError, match="nfa_over: these settings do not fit together"):
        running.run(e, OverSettings(rates=(0.1,)), tmp_path)


@pytest.mark.parametrize(("field", "values"), [("spectrum", ["flat", "steep"]), ("data", ["digits"]), ("kind", ["mlp", "cnn"])])
def test_a_field_has_the_values_of_its_plural_in_the_settings(field: str, values: list[str]) -> None:
    e = experiment(over=(field,))
    assert [getattr(t, field) for t in e.tasks(e.smoke)] == values


def test_a_field_without_values_is_named() -> None:
    e = experiment(over=("width",))
    with pytest.raises(SelectionError, match=r"over=\('width',\).*'widths'"):
        e.tasks(e.smoke)


def test_settings_that_only_claims_read_change_no_task() -> None:
    other = OverSettings(formula="printed")
    assert experiment().tasks(other) != experiment().tasks(OverSettings())
    assert experiment(analysis=("formula",)).tasks(other) == experiment(analysis=("formula",)).tasks(OverSettings())


def test_settings_of_the_analysis_need_a_default() -> None:
    with pytest.raises(SelectionError, match=r"analysis=\('formulae',\).*no default for 'formulae'.*out of analysis"):
        experiment(analysis=("formulae",)).tasks(OverSettings())


def test_a_function_lists_tasks_that_are_no_product_and_its_code_is_in_the_key() -> None:
    def last(s: OverSettings) -> list[Task[OverSettings]]:
        return [Task(replace(s, seeds=()), depth=s.depths[-1], seed=seed) for seed in s.seeds]
    e = experiment(over=last, analysis=("formula",))
    tasks = e.tasks(OverSettings(formula="printed"))
    assert [(t.depth, t.seed, t.settings.formula) for t in tasks] == [(3, 0, "own"), (3, 1, "own")]
    assert "test_over.py" in e.modules


def test_without_over_the_settings_are_the_only_task() -> None:
    assert experiment(over=()).tasks(OverSettings(n=3)) == [OverSettings(n=3)]


def test_a_task_is_read_only_and_goes_to_other_processes() -> None:
    task = Task(OverSettings(), depth=3, seed=1)
    with pytest.raises(AttributeError, match=r"Task\(settings, seed=\.\.\.\)"):
        task.seed = 2
    again = pickle.loads(pickle.dumps(task))
    assert again == task
    assert hash(again) == hash(task)
    assert again != Task(OverSettings(), depth=3, seed=2)


def test_a_task_is_kept_and_named_by_its_values() -> None:
    task = Task(OverSettings(), depth=3, seed=1)
    assert plain(task) == {"settings": plain(OverSettings()), "depth": 3, "seed": 1}
    assert name_of(work, task).startswith("depth3-seed1-")
    assert name_of(work, task) != name_of(work, Task(OverSettings(n=11), depth=3, seed=1))


def test_results_are_selected_by_the_values_of_tasks(tmp_path: Path) -> None:
    e = experiment()
    r = running.run(e, e.smoke, tmp_path)
    assert r["value"].tolist() == [20, 21, 30, 31]
    assert r.where(depth=3)["value"].tolist() == [30, 31]
    assert isinstance(r, Results)
    with pytest.raises(SelectionError, match="'depth'"):
        r.where(width=3)
    more = running.run(dataclasses.replace(e, over=("depth", "seed")), OverSettings(seeds=(0, 1, 2)), tmp_path)
    assert len(more) == 6
