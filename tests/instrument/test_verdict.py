"""The verdict: each rule on both sides of its edges, their order, what is said beside it, and real trainings."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import richter
from judged import LOG, MOVED, START, STILL, TEN, Training, assert_consistent, snapshot
from richter.core import Failure, Labels, Mark, Row, SelectionError, StoreError
from richter.core.values import FEW_BATCHES, MOVED_BUFFERS, NO_DATA, NO_HIDDEN, REFERENCE_COPY, ZERO_START
from richter.instrument.snapshot import Snapshot
from richter.instrument.training import Margin, loss_name, summary
from richter.instrument.verdict import diagnose, layer_regime, regime, regime_margin
from richter.models import mlp
from richter.runs import Series


def word(**given: Any) -> str:
    return diagnose(Training(**given)).word


def without(labels: bool = True, *names: str) -> Training:
    t = Training(labels=TEN if labels else None)
    t.snapshots = [replace(s, rows=tuple(r for r in s.rows if r.measure not in names)) for s in t.snapshots]
    return t


def test_how_many_features_is_said_and_is_no_praise() -> None:
    """Few features are not good ones: neither the word nor any sentence says so."""
    plain = diagnose(Training())
    for kappa, words in ((0.04, "as few as the outputs need (below 0.1)"), (0.4, "more than the outputs need")):
        t = Training()
        more = {"kappa_cka": kappa, "deff_utilisation": 10.2, "nc1": 0.05}
        last = t.snapshots[-1]
        t.snapshots[-1] = replace(last, rows=(*last.rows, *(Row(last.step, "*", m, v) for m, v in more.items())))
        judged = diagnose(t)
        said = [line for line in judged.evidence if line not in plain.evidence]
        assert (judged.word, judged.verdict) == (plain.word, plain.verdict)
        assert said[0].startswith(f"features of the last layer: kappa_cka {kappa}, {words}, 10.2 used. Whether they are good")
        assert said[1].startswith("NC1: within / between classes: 0.05")
        assert "may have as few" in said[0]


# ---------------------------------------------------------------------------------------------------------------- bands

@pytest.mark.parametrize(("G", "F", "verdict"), [
    (0.049, 0.019, "lazy"), (0.05, 0.019, "probably lazy"), (0.049, 0.02, "probably lazy"), (0.099, 0.049, "probably lazy"),
    (0.1, 0.049, "uncertain"), (0.099, 0.05, "uncertain"), (0.49, 0.049, "uncertain"), (0.5, 0.049, "amplified"),
    (0.5, 0.05, "uncertain"), (0.99, 0.0, "amplified"), (0.5, 0.1, "rich"), (0.49, 0.9, "uncertain"),
    (0.5, 0.099, "uncertain"), (0.99, 0.9, "rich"), (0.0, -0.01, "lazy"), (0.02, 0.5, "uncertain")])
def test_the_bands(G: float, F: float, verdict: str) -> None:
    found = diagnose(Training({"linearisation_gap": G, "feature_change_cka": F}))
    assert (found.word, regime(G, F)) == (verdict, verdict)
    assert found.verdict.startswith(f"{verdict}. ")
    assert f"linearisation_gap {G:.3g}" in found.verdict


@pytest.mark.parametrize(("r", "verdict"), [
    (0.0, "frozen"), (1e-9, "lazy"), (0.149, "lazy"), (0.15, "uncertain"), (0.499, "uncertain"), (0.5, "probably rich"),
    (0.999, "probably rich"), (1.0, "rich"), (math.nan, "unknown")])
def test_the_bands_of_a_layer(r: float, verdict: str) -> None:
    assert layer_regime(r) == verdict


def test_layers_are_judged_by_what_they_compute_and_read_outs_are_not() -> None:
    layers = {"a": (1.2, 0.5), "b": (0.0, 0.0), "c": (0.1, 0.3), "z": (45.0, 0.9)}
    found = {v.layer: v for v in diagnose(Training(layers=layers)).layers}
    assert {k: v.verdict for k, v in found.items()} == {"a": "rich", "b": "frozen", "c": "lazy", "z": "read-out"}
    assert str(found["a"]) == "learned features (function_change 1.2, weight_change 0.5)"
    assert found["z"].evidence == {"weight_change": 0.9}  # what is so by definition is no evidence
    assert str(found["b"]) == "frozen: did not move (weight_change 0)"
    bias = {"a": (0.2, 0.0), "z": (1.0, 1.0)}  # the weight of a stayed, its bias did not
    assert [v.verdict for v in diagnose(Training(layers=bias)).layers] == ["uncertain", "read-out"]


@pytest.mark.parametrize("now", [{"output_spread": 0.0}, {"probe_loss": LOG, "probe_accuracy": 0.1}, {"probe_loss": 0.8 * LOG}])
def test_the_layers_of_a_training_that_failed_are_not_called_rich(now: dict[str, float]) -> None:
    found = diagnose(Training(now, layers={"a": (1.2, 0.5), "b": (0.0, 0.0), "z": (45.0, 0.9)}))
    assert [v.verdict for v in found.layers] == ["unknown", "frozen", "read-out"]
    assert str(found.layers[0]) == "not judged (function_change 1.2, weight_change 0.5)"


def test_the_margin_is_to_the_nearest_edge_that_changes_the_word() -> None:
    assert regime_margin(0.7, 0.11) == Margin("feature_change_cka", 0.11, 0.1, "uncertain")
    assert regime_margin(0.51, 0.9) == Margin("linearisation_gap", 0.51, 0.5, "uncertain")
    near = regime_margin(0.52, 0.15, 0.001, 0.02)  # in standard errors F is nearer
    assert near is not None
    assert (near.number, near.edge, near.error) == ("feature_change_cka", 0.1, 0.02)
    assert near.distance == pytest.approx(0.05)
    assert near.errors == pytest.approx(2.5)
    assert str(near) == ("the verdict would become 'uncertain' if feature_change_cka (0.15) fell below 0.1, 2.5 standard errors "
                         "away")
    assert str(regime_margin(0.04, 0.0)) == "the verdict would become 'probably lazy' if linearisation_gap (0.04) rose to 0.05"
    margin = regime_margin(0.2, 0.01, changes=[0.7])  # a layer learned features: not lazy, whatever G is
    assert margin is not None
    assert margin.other == "amplified"


def test_a_margin_to_no_single_verdict_names_none() -> None:
    """It read: would become 'another' ..., 1.4e+02 standard errors away."""
    assert str(diagnose(Training({"probe_loss": 0.9 * LOG})).margin).startswith("the verdict would be another one if probe_loss")
    assert str(Margin("a", 1.0, 0.5, "", 0.0035)) == ("the verdict would be another one if a (1) fell below 0.5, 140 standard "
                                                      "errors away")


@pytest.mark.parametrize(("G", "F", "change", "reason"), [
    (0.97, 0.09, 1.5, "and the functions of layers changed, but its hidden representations hardly turned: by less than the 0.1"),
    (0.97, 0.09, 0.3, "at initialisation, but its hidden representations hardly turned: by less than the 0.1"),
    (0.97, 0.3, 0.3, "but no layer's function changed by 0.5 or more"),
    (0.3, 0.3, 1.5, "in part at most: the gap is below the 0.5"), (0.02, 0.01, 1.5, "those of a lazy network, but the function"),
    (0.3, 0.03, 0.3, "is between lazy and rich"), (0.3, 0.03, 1.5, "is between lazy and rich")])
def test_uncertain_says_which_numbers_disagree(G: float, F: float, change: float, reason: str) -> None:
    """All layers had learned features, and nothing said why the verdict was uncertain."""
    found = diagnose(Training({"linearisation_gap": G, "feature_change_cka": F}, layers={"a": (change, 0.3), "z": (9.0, 0.5)}))
    assert found.word == "uncertain"
    assert reason in found.verdict


def test_evidence_begins_with_what_happened() -> None:
    said = diagnose(Training(loss=falling(0.5 * LOG))).evidence
    for line in ("the loss of the probe fell: ", "the accuracy on the probe rose: ", "the logged loss fell: "):
        assert any(e.startswith(line) for e in said)


def test_what_noise_may_have_made_is_said() -> None:
    assert any("within two standard errors of 0.1: it may as well be uncertain" in r
               for r in diagnose(Training({"feature_change_cka": 0.11})).remarks)
    assert not any("standard errors" in r for r in diagnose(Training()).remarks)


def test_the_magnitude_heads_what_did_not_fail() -> None:
    found = diagnose(Training())
    assert found.magnitude is not None
    assert str(found.magnitude) == "0.368(10)"
    assert (found.magnitude.step, found.magnitude.bound) == (100, False)
    assert str(found).startswith("Magnitude: 0.368(10)\nVerdict: rich. ")
    assert "measured at step 100; the verdict would become 'uncertain' if linearisation_gap (0.7) fell below 0.5" in str(found)
    far = Training({"linearisation_gap": 1e-5, "feature_change_cka": 0.0, "magnitude": -3.0})
    last = far.snapshots[-1]
    far.snapshots[-1] = replace(last, rows=tuple(
        replace(r, mark=Mark.BOUND, error=math.nan) if r.measure == "magnitude" else r for r in last.rows))
    assert str(diagnose(far).magnitude) == "at most -3"
    assert diagnose(Training({"probe_loss": LOG, "probe_accuracy": 0.1})).magnitude is None


# ------------------------------------------------------------- one rule for the word, the magnitude's sign and the layers

@pytest.mark.parametrize("G", [0.01, 0.07, 0.2, 0.43, 0.5, 0.6, 0.95])
@pytest.mark.parametrize("F", [0.0, 0.03, 0.07, 0.12, 0.6])
@pytest.mark.parametrize("r", [0.01, 0.3, 0.49, 0.5, 1.2])
def test_no_word_contradicts_the_magnitude_or_the_layers(G: float, F: float, r: float) -> None:
    """A ResNet was "rich" with a magnitude of -0.94, and no rich layer."""
    found = diagnose(Training({"linearisation_gap": G, "feature_change_cka": F, "magnitude": math.log10(G / (1 - G))},
                              layers={"a": (r, 0.5), "c": (0.02, 0.3), "z": (45.0, 0.9)}))
    assert_consistent(found)
    assert (found.word == "rich") is (G >= 0.5 and F >= 0.1 and r >= 0.5)
    assert ("Layers that learned features: a." in found.verdict) is (found.word == "rich")


# ---------------------------------------------------------------------------------------------------- what the user knows

def with_notes(t: Training, **notes: str) -> Training:
    t.snapshots = [replace(s, notes=notes) for s in t.snapshots]
    return t


def test_zero_initialised_branches_are_named_and_are_no_rich_layers() -> None:
    t = with_notes(Training({"linearisation_gap": 0.01, "feature_change_cka": 0.0, "magnitude": -2.0},
                       layers={"a": (0.1, 0.1), "c": (7.0, 1.0), "z": (45.0, 0.9)}), c=ZERO_START, bn2=ZERO_START, z=ZERO_START)
    found = diagnose(t)
    assert found.word == "lazy"
    assert [v.verdict for v in found.layers] == ["lazy", "zero start", "read-out"]
    remark = next(r for r in found.remarks if r.startswith("zero-initialised branches"))
    assert "c, bn2 began at zero (2 in all)" in remark


def test_a_reference_copy_is_not_advised_to_train() -> None:
    t = with_notes(Training({"linearisation_gap": 0.01, "feature_change_cka": 0.0, "magnitude": -2.0},
                       layers={"a": (0.1, 0.1), "ref": (0.0, 0.0), "z": (45.0, 0.9)}), ref=f"{REFERENCE_COPY} a")
    found = diagnose(t)
    assert [v.verdict for v in found.layers] == ["lazy", "reference", "read-out"]
    assert "train too" not in " ".join(found.advice)
    assert not any(r.startswith("frozen") for r in found.remarks)
    assert any(r.startswith("reference copy: ref") for r in found.remarks)


def test_a_user_says_whether_the_model_was_pretrained() -> None:
    for known in (None, True, False):
        t = Training({"linearisation_gap": 0.01, "feature_change_cka": 0.0, "magnitude": -2.0})
        t.pretrained = known  # type: ignore[attr-defined]
        found = diagnose(t)
        assert any("whether the network was pretrained" in u for u in found.unknown) is (known is None)
        assert ("pretrained" in " ".join(found.advice)) is (known is None)
        assert ("relative to the given start" in found.verdict) is (known is True)


def test_what_held_out_examples_do_not_show_is_memorised() -> None:
    t = Training({"held_out_accuracy": 0.12, "probe_accuracy": 0.84})
    found = diagnose(t)
    assert found.word == "memorised"
    assert "accuracy on the probe 0.84, accuracy on the held-out examples of the probe 0.12, guessing 0.1" in found.verdict
    assert "By its numbers it is rich" in found.verdict
    assert (found.margin.other, found.magnitude is not None) == ("rich", True)  # type: ignore[union-attr]
    assert not any("memorised" in u for u in found.unknown)
    assert diagnose(Training({"held_out_accuracy": 0.5, "probe_accuracy": 0.84})).word == "rich"


@pytest.mark.parametrize(("name", "values", "expected"), [
    ("test_accuracy", [0.1, 0.12], "memorised"), ("val/acc", [10.0, 12.0], "memorised"), ("test_acc", [0.1, 0.7], "rich"),
    ("train_accuracy", [0.1, 0.12], "rich")])
def test_a_logged_test_accuracy_says_so_too(name: str, values: list[float], expected: str) -> None:
    t = Training()
    t.scalar_names = [name]
    t.scalars = lambda _: Series(np.arange(2), np.array(values), np.full(2, math.nan))  # type: ignore[method-assign]
    assert diagnose(t).word == expected


# --------------------------------------------------------------------------------------------------------------- failures

def constant(last: float, first: float = LOG, n: int = 400) -> list[float]:
    return [first] + [last] * n


@pytest.mark.parametrize(("given", "fails"), [
    ({"loss": [*constant(0.5), math.nan]}, True), ({"loss": [*constant(0.5), math.inf, math.nan]}, True),
    ({"loss": [LOG, math.nan, *constant(0.5)]}, False),  # it recovered
    ({"loss": constant(1.51 * LOG)}, True), ({"loss": constant(1.49 * LOG)}, False),
    ({"loss": constant(1.16, first=0.5)}, True), ({"loss": constant(1.14, first=0.5)}, False),  # log(10) / 2 is 1.151
    ({"now": {"probe_loss": 2.01 * LOG, "probe_accuracy": 0.19}}, True),
    ({"now": {"probe_loss": 1.99 * LOG, "probe_accuracy": 0.19}}, False),
    ({"now": {"probe_loss": 2.01 * LOG, "probe_accuracy": 0.195}}, False),
    ({"now": {"probe_loss": 15.0, "probe_accuracy": 0.1}, "start": {"probe_loss": 8.0}}, False),
    ({"now": {"probe_loss": 16.1, "probe_accuracy": 0.1}, "start": {"probe_loss": 8.0}}, True),
    ({"now": {"probe_loss": 9.0, "probe_accuracy": 0.1}, "loss": constant(0.1)}, False),  # noise that was memorised
    ({"now": {"probe_loss": math.inf}}, True), ({"now": {"output_rms": math.inf}}, True),
    ({"now": {"probe_loss": 5.0}, "labels": None}, True), ({"now": {"probe_loss": 4.5}, "labels": None}, False),
    ({"failures": (Failure("not measured (DivergedError: parameter '0.weight' contains NaN)", 120, 130, 2),)}, True),
    ({"failures": (Failure("not measured (DivergedError: parameter '0.weight' contains NaN)", 50, 60, 2),)}, False),
    ({"failures": (Failure("not written (StoreError: no room)", 120, 120),)}, False)])
def test_diverged(given: dict[str, Any], fails: bool) -> None:
    found = diagnose(Training(**given))
    assert (found.word == "diverged") is fails, found.verdict
    if fails and given.get("failures"):
        assert found.verdict == "diverged: at step 120: parameter '0.weight' contains NaN."
    if fails:
        assert "smaller learning rate" in found.advice[0]
        assert "start smaller" not in " ".join(found.advice)
        assert found.magnitude is None


def test_untrained_and_measured_only_at_the_start() -> None:
    same = {"linearisation_gap": math.nan, "feature_change_cka": math.nan, "magnitude": math.nan, **START}
    found = diagnose(Training(same, layers=STILL))
    assert found.word == "untrained"
    assert "at step 100" in found.verdict
    assert "does the optimiser hold" in found.advice[0]
    assert found.remarks == ()
    alone = snapshot(0, same, STILL)
    found = diagnose(alone)
    assert (found.word, found.step) == ("untrained", 0)
    assert "measured at step 0" in str(found)
    budget = SimpleNamespace(snapshots=[alone], scalar_names=[], failures=[], last=900)  # which allowed no other measurement
    found = diagnose(budget)
    assert found.word == "stale"
    assert "measured at step 0 only" in found.verdict
    assert "step 900" in found.verdict
    assert (found.layers, found.remarks) == ((), ())  # which have moved since
    lost = Training(loss=[LOG, math.nan], reached=900)
    lost.snapshots = [alone]
    assert diagnose(lost).word == "diverged"
    assert diagnose(lost).layers == ()
    assert not any("frozen" in r for r in diagnose(lost).remarks)
    biases = {"a": (0.1, 0.0), "z": (math.nan, 0.0)}  # something moved, though no weight did
    assert diagnose(Training({"linearisation_gap": math.nan}, layers=biases)).word == "unknown"
    assert diagnose(Training({"linearisation_gap": 0.2}, layers=STILL)).word != "untrained"


@pytest.mark.parametrize(("spread", "before", "rms", "fails"), [
    (0.9e-3, 1.0, 0.0, True), (1.1e-3, 1.0, 0.0, False), (1.9e-3, 1.0, 2.0, True), (2.1e-3, 1.0, 2.0, False),
    (0.9e-6, 1e-9, 1e-9, True), (1.1e-6, 1e-9, 1e-9, False), (0.0, 0.0, 0.0, True), (0.0, math.nan, math.nan, True)])
def test_collapsed(spread: float, before: float, rms: float, fails: bool) -> None:
    found = diagnose(Training({"output_spread": spread, "output_rms": rms}, {"output_spread": before}))
    assert (found.word == "collapsed") is fails
    if fails:
        assert ("weight decay" in found.advice[0]) is not (before < 1e-6)
        assert ("larger initial weights" in found.advice[0]) is (before < 1e-6)


@pytest.mark.parametrize(("given", "fails"), [
    ({"now": {"probe_loss": 0.91 * LOG, "probe_accuracy": 0.19}}, True),
    ({"now": {"probe_loss": 0.89 * LOG, "probe_accuracy": 0.19}}, False),
    ({"now": {"probe_loss": 0.91 * LOG, "probe_accuracy": 0.195}}, False),
    ({"now": {"probe_loss": LOG, "probe_accuracy": 0.1}, "loss": constant(0.89 * LOG)}, False),
    ({"now": {"probe_loss": LOG, "probe_accuracy": 0.1}, "loss": constant(0.91 * LOG)}, True),
    ({"now": {"probe_loss": math.nan, "probe_accuracy": math.nan}, "labels": None, "loss": constant(0.91 * LOG)}, True),
    ({"now": {"probe_loss": 0.91 * LOG}, "labels": None}, True)])
def test_not_learning(given: dict[str, Any], fails: bool) -> None:
    found = diagnose(Training(**given))
    assert (found.word == "not learning") is fails, found.verdict
    if fails:
        assert found.margin is not None
        assert (found.margin.edge, found.margin.other) == (0.9, "early")
        assert "smaller learning rate" in found.advice[0]
    still = diagnose(Training(**given, layers={"a": (1e-4, 1e-4), "z": (1.0, 1e-4)}))
    assert not fails or "larger learning rate" in still.advice[0]


def test_a_loss_that_fell_to_that_of_guessing_is_no_learning() -> None:
    given = {"now": {"probe_loss": 1.02 * LOG, "probe_accuracy": 0.15}, "start": {"probe_loss": 7.3, "probe_accuracy": 0.02}}
    found = diagnose(Training(**given))  # type: ignore[arg-type]
    assert found.word == "not learning"
    assert "that of guessing" in found.verdict
    assert diagnose(Training(**given, loss=[7.3, 7.3, *[2.3] * 200])).word == "not learning"  # type: ignore[arg-type]
    assert diagnose(Training(**given, loss=[7.3, 7.3, *[1.0] * 200])).word != "not learning"  # type: ignore[arg-type]


def test_outputs_around_a_large_mean_have_not_collapsed() -> None:
    numbers = {"output_spread": 89.0, "output_rms": 1e5, "probe_loss": 6.4}
    before = {"output_spread": 0.3, "output_rms": 1e5, "probe_loss": 8000.0}
    assert diagnose(Training(numbers, before, labels=None)).word == "rich"
    assert diagnose(Training(numbers, {**before, "output_spread": 100.0}, labels=None)).word == "collapsed"
    assert diagnose(Training({**numbers, "probe_loss": 7999.0}, before, labels=None)).word == "collapsed"


def test_a_gap_that_rounding_hides_is_no_verdict() -> None:
    t = Training({"linearisation_gap": 0.6, "feature_change_cka": 0.01})
    assert diagnose(t).word == "amplified"
    rows = [replace(r, mark=Mark.BOUND, note="below 0.6, what rounding makes") if r.measure == "linearisation_gap" else r
            for r in t.snapshots[1].rows]
    t.snapshots[1] = replace(t.snapshots[1], rows=tuple(rows))
    assert diagnose(t).word == "unknown"
    assert "double precision" in diagnose(t).verdict


def falling(last: float, n: int = 400) -> list[float]:
    """Evenly, from log 10 to this at the end as it is smoothed."""
    return np.linspace(LOG, LOG + (last - LOG) * n / (n - 20), n).tolist()


@pytest.mark.parametrize(("ratio", "logged", "fails"), [
    (0.76, None, True), (0.74, None, False), (0.85, 0.7, False), (0.7, 0.85, False), (0.85, 0.8, True)])
def test_early(ratio: float, logged: float | None, fails: bool) -> None:
    found = diagnose(Training({"probe_loss": ratio * LOG}, loss=None if logged is None else falling(logged * LOG)))
    assert (found.word == "early") is fails
    if fails:
        assert "so far" in found.verdict
        assert any(e.startswith("so far, its numbers are those of a training that is rich (") for e in found.evidence)
        assert found.magnitude is None


def decaying(constants: float, end: float = 0.8, noise: float = 0.0, n: int = 4000) -> list[float]:
    """A loss that decays exponentially from log 10 to a share of it, for so many time constants."""
    rest = np.exp(-constants * np.linspace(0, 1, n))
    return (LOG * (end + (1 - end) * rest) + noise * np.random.default_rng(0).standard_normal(n)).tolist()


@pytest.mark.parametrize(("loss", "word_"), [
    (decaying(0.01), "early"), (decaying(2.0), "early"), (decaying(2.5), "early"), (decaying(3.1), "rich"),
    (decaying(5.0), "rich"), (decaying(5.0, noise=0.3), "rich"), (decaying(5.0, noise=0.3, n=160), "early"),
    (decaying(5.0, n=40), "rich"), (decaying(5.0, n=30), "early")])  # of so few values it is not known
def test_a_loss_that_no_longer_falls_is_not_early(loss: list[float], word_: str) -> None:
    """Where noise or capacity bounds it: by the same numbers a training that still falls is early."""
    found = diagnose(Training({"probe_loss": 0.8 * LOG, "probe_accuracy": 0.3}, loss=loss))
    assert found.word == word_, found.verdict
    assert any("only, and no longer falls" in r for r in found.remarks) is (word_ == "rich")


@pytest.mark.parametrize(("accuracy", "level", "labels", "word_"), [
    (0.19, 0.95, TEN, "early"), (0.2, 0.95, TEN, "rich"), (0.19, 0.89, TEN, "rich"), (math.nan, 0.89, None, "rich")])
def test_a_loss_at_rest_is_that_of_a_network_better_than_guessing(accuracy: float, level: float, labels: Labels | None, word_: str
                                                                  ) -> None:
    """The edges are p + 5 s = .194, and nine tenths of the loss of guessing."""
    start = {"probe_loss": 1.1 * LOG}
    given = Training({"probe_loss": 0.9 * LOG, "probe_accuracy": accuracy}, start, labels=labels, loss=decaying(8.0, level))
    assert diagnose(given).word == word_, diagnose(given).verdict
    if word_ == "early":
        assert "no longer falls, but the network is hardly better than guessing" in diagnose(given).verdict


def test_whether_a_loss_rests_is_a_matter_of_steps() -> None:
    """And not of how many values were logged: these are dense at the start."""
    steps = np.unique(np.geomspace(1, 4000, 400).astype(int))
    values = (LOG - steps / 4000).tolist()
    loss = summary("loss", steps.tolist(), values)
    assert loss is not None
    assert loss.late == pytest.approx(2 / 7, rel=0.05)
    assert not loss.rests
    rising = summary("loss", range(400), np.linspace(1, 2, 400).tolist())
    assert rising is not None
    assert math.isnan(rising.late)
    assert not rising.rests


@pytest.mark.parametrize(("reached", "fails"), [(None, False), (100, False), (200, False), (201, True), (3000, True)])
def test_stale(reached: int | None, fails: bool) -> None:
    found = diagnose(Training(reached=reached))
    assert (found.word == "stale") is fails
    assert found.step == 100
    if fails:
        assert f"last measured at step 100, and training is at step {reached:,}" in found.verdict
        assert any(e.startswith("then, at step 100, its numbers were those of a training that is rich") for e in found.evidence)
        assert "watch.now(step)" in found.advice[0]
    elif reached == 200:
        assert any("what it did after step 100 is not in these numbers" in r for r in found.remarks)


def test_the_rules_come_in_their_order() -> None:
    """Of two that apply the earlier one speaks."""
    bad: dict[str, Any] = {"loss": [LOG, math.nan], "reached": 3000, "layers": STILL, "now": {
        "output_spread": 0.0, "probe_loss": LOG, "probe_accuracy": 0.1, "linearisation_gap": math.nan}}
    assert word(**bad) == "diverged"
    bad["loss"] = None
    assert word(**{**bad, "reached": 100}) == "untrained"
    bad["layers"] = MOVED
    assert word(**bad) == "collapsed"
    bad["now"]["output_spread"] = 1.0
    assert word(**bad) == "not learning"
    bad["now"]["probe_loss"] = 0.85 * LOG
    assert word(**bad) == "early"
    bad["now"]["probe_loss"] = 0.1
    assert word(**bad) == "stale"
    bad["reached"] = 100
    assert word(**bad) == "unknown"
    bad["now"]["linearisation_gap"] = 0.7
    assert word(**bad) == "rich"


# ---------------------------------------------------------------------------------------------- remarks, and the unknown

@pytest.mark.parametrize(("accuracy", "given"), [(0.19, False), (0.2, True)])
def test_fine_tuning_is_relative_to_its_start(accuracy: float, given: bool) -> None:
    lazy = {"linearisation_gap": 0.01, "feature_change_cka": 0.001}
    found = diagnose(Training(lazy, {"probe_accuracy": accuracy}))
    assert any(r.startswith("fine-tuning") for r in found.remarks) is given
    assert found.verdict.startswith("lazy, relative to the given start" if given else "lazy. ")
    assert ("if the initial weights were random, start smaller: scale them" in found.advice[0]) is not given
    assert ("scale" in " ".join(found.advice).replace("the initial scale is what was given", "")) is not given
    assert any(line.startswith("whether the network was pretrained: ") for line in found.unknown) is not given
    assert ("If they were pretrained (a new head on pretrained layers), leave their scale alone" in found.advice[0]) is not given


def test_features_that_only_grew_are_advised_on_scale_if_the_start_was_random() -> None:
    found = diagnose(Training({"linearisation_gap": 0.6, "feature_change_cka": 0.01}))
    assert found.word == "amplified"
    assert "train longer; if the initial weights were random, scale them (or the output) down" in found.advice[0]
    assert "If they were pretrained (a new head on pretrained layers), leave their scale alone" in found.advice[0]


def test_a_first_measurement_that_came_late_is_no_given_start() -> None:
    t = Training(start={"probe_accuracy": 0.9})
    t.snapshots[0] = snapshot(10, {**START, "probe_accuracy": 0.9, "linearisation_gap": 0.1}, MOVED)
    assert not any("fine-tuning" in r for r in diagnose(t).remarks)


def test_an_unbalanced_probe_is_no_given_start() -> None:
    """A network that always says the most frequent class knows nothing, however often that is right."""
    t = Training(start={"probe_accuracy": 0.9}, labels=Labels(256, 10, 0.9))
    assert not any("fine-tuning" in r for r in diagnose(t).remarks)
    assert TEN.noise == pytest.approx(0.01875)


@pytest.mark.parametrize(("first", "large"), [(1.99 * LOG, False), (2.01 * LOG, True)])
def test_large_initial_outputs_are_to_be_scaled_down(first: float, large: bool) -> None:
    found = diagnose(Training(start={"probe_loss": first}))
    assert any(r.startswith("large initial outputs") for r in found.remarks) is large
    assert any("scale the initial weights" in a for a in found.advice) is large
    assert not any("large" in r for r in diagnose(Training(start={"probe_loss": first, "probe_accuracy": 0.5})).remarks)


def test_frozen_layers_are_said_to_be_so() -> None:
    layers = {"a": (0.0, 0.0), "c": (0.0, 0.0), "z": (3.0, 0.4)}
    found = diagnose(Training({"linearisation_gap": 1e-16, "feature_change_cka": 0.0}, layers=layers))
    assert found.word == "lazy"
    assert any("frozen: a, c did not move at all (2 of 3 layers)" in r for r in found.remarks)
    assert found.advice == ("only the read-out was trained: to learn features, let other layers train too.",)
    many = {**{f"h{i}": (0.0, 0.0) for i in range(30)}, "a": (2.0, 1.0), "z": (3.0, 0.4)}
    assert any("h0, h1, h2, h3 and 26 more did not move" in r for r in diagnose(Training(layers=many)).remarks)


def test_a_loss_that_recovered_is_remarked() -> None:
    found = diagnose(Training(loss=[LOG, math.nan, *constant(0.1)]))
    assert "loss was not finite 1 times, and recovered." in found.remarks


def test_it_says_what_it_cannot_tell() -> None:
    assert diagnose(Training()).unknown == (
        "whether the network was pretrained: accuracy started at chance, which also happens with a new head on pretrained "
        "layers.",
        "whether what was learned is good: memorised noise is rich too. Held-out examples say that.",)
    late = Training()
    late.snapshots[0] = snapshot(10, {**START, "linearisation_gap": 0.1}, MOVED)
    assert diagnose(late).unknown[0] == ("whether the network was pretrained: its first measurement came after training had "
                                         "begun. Observer(pretrained=False) or True says so.")
    only = diagnose(Training().snapshots[-1])  # no first measurement
    assert any("there is no measurement of its initial weights" in line for line in only.unknown)
    found = diagnose(without(False, "probe_loss", "probe_accuracy"))
    assert found.word == "rich"
    assert found.unknown[0].startswith("whether anything was learned")
    assert diagnose(Training().snapshots[-1]).unknown[0].startswith("whether anything was learned")
    logged = Training(labels=None, loss=constant(0.1))
    logged.snapshots = [replace(s, rows=tuple(r for r in s.rows if "probe" not in r.measure)) for s in logged.snapshots]
    assert diagnose(logged).unknown[0].startswith("whether the network was pretrained")


def test_a_run_without_these_numbers_gets_no_verdict_and_what_can_be_said() -> None:
    """The old rule is not used in their place."""
    t = without(True, "linearisation_gap", "feature_change_cka", "magnitude", "function_change")
    rows = [Row(100, k, "c_uc_ratio", 0.9) for k in "acz"]
    t.snapshots[-1] = replace(t.snapshots[-1], rows=(*t.snapshots[-1].rows, *rows))
    found = diagnose(t)
    assert (found.word, found.step, found.magnitude, found.margin) == ("unknown", 100, None, None)
    assert found.verdict.startswith("unknown: linearisation_gap was not measured and feature_change_cka was not measured")
    assert [v.verdict for v in found.layers] == ["unknown"] * 3
    assert "c_uc_ratio 0.9" in str(found)
    bare = diagnose(Snapshot((Row(5, "a", "nfc", 0.5),), 5))
    assert "The weights at initialisation are needed: pass initial=state_dict" in bare.verdict
    refused = Training({"linearisation_gap": math.nan})
    refused.snapshots[-1] = replace(refused.snapshots[-1], rows=tuple(
        replace(r, note="no Jacobian-vector product", mark=Mark.REFUSED) if r.measure == "linearisation_gap" else r
        for r in refused.snapshots[-1].rows))
    assert diagnose(refused).verdict.startswith("unknown: there is no linearisation_gap (no Jacobian-vector product).")


# ------------------------------------------------------------------------- norms without data, buffers, guesses, one layer

ANSWERS = ("probe_loss", "probe_accuracy", "output_spread", "output_rms")
FRESH, FEW = f"2 {NO_DATA} yet", f"2 {FEW_BATCHES} (1)"


def noted(t: Training, first: str = "", last: str = "", measures: tuple[str, ...] = ANSWERS) -> Training:
    """With notes beside the numbers of the two measurements."""
    t.snapshots = [replace(s, rows=tuple(replace(r, note=note) if r.measure in measures else r for r in s.rows))
                   for s, note in zip(t.snapshots, (first, last), strict=True)]
    return t


WILD = {"probe_loss": 3e4, "output_spread": 5e4, "output_rms": 5e4}  # of a network whose norms normalise nothing


@pytest.mark.parametrize("first", [FRESH, FEW])
def test_answers_with_norms_that_have_seen_no_data_are_not_compared(first: str) -> None:
    assert diagnose(Training(start=WILD)).word == "collapsed"
    found = diagnose(noted(Training(start=WILD), first))
    assert found.word == "rich"
    assert not any("large initial outputs" in r for r in found.remarks)
    assert any("are not compared, because norms had not seen enough data" in r for r in found.remarks)
    assert any(line.endswith("the first measurement does not show what it knew.") for line in found.unknown)
    assert "the loss of the probe: 0.2" in found.evidence
    assert diagnose(noted(Training({"output_spread": 1e-7}, WILD), first)).word == "collapsed"
    assert diagnose(noted(Training({"output_spread": 1e-4, "probe_loss": LOG, "probe_accuracy": 0.1}, WILD), first)).word \
        == "collapsed"


def test_guessing_stands_in_for_a_start_that_says_nothing() -> None:
    """Else a network that has learned nothing would have fallen far from its wild start."""
    labels = replace(TEN, entropy=LOG)
    for now, verdict in (({"probe_loss": 0.95 * LOG, "probe_accuracy": 0.15}, "not learning"),
                         ({"probe_loss": 0.8 * LOG, "probe_accuracy": 0.4}, "early"), ({"probe_loss": 0.5 * LOG}, "rich"),
                         ({"probe_loss": 3 * LOG, "probe_accuracy": 0.1}, "not learning")):  # it may have begun with 10 log C
        assert diagnose(noted(Training(now, WILD, labels=labels), FRESH)).word == verdict
    found = diagnose(noted(Training({"probe_loss": 0.95 * LOG, "probe_accuracy": 0.15}, WILD, labels=labels), FRESH))
    assert "probe_loss / that of guessing is 0.95" in found.verdict
    silent = noted(Training({"probe_loss": 0.95 * LOG, "probe_accuracy": 0.15}, WILD), FRESH)  # no cross-entropy: accuracy alone
    assert diagnose(silent).word == "not learning"
    assert diagnose(noted(Training({"probe_loss": 7.0}, WILD), FRESH)).word == "rich"


def test_norms_that_are_not_trained_with_batches_are_part_of_the_network() -> None:
    """They have seen nothing at the end either: the network is trained in eval mode."""
    found = diagnose(noted(Training(start={"probe_loss": 3 * LOG}), FRESH, FRESH))
    assert any("large initial outputs" in r for r in found.remarks)
    assert not any("not compared" in r for r in found.remarks)
    assert diagnose(noted(Training(start=WILD), f"3 {NO_DATA} yet", f"1 {NO_DATA} yet")).word == "rich"  # one is not used


def test_answers_after_few_batches_are_not_judged() -> None:
    wild = {"probe_loss": 40.0, "probe_accuracy": 0.1, "output_spread": 0.0}
    found = diagnose(noted(Training(wild), FRESH, FEW))
    assert found.word == "rich"
    assert any("its norms have seen too few batches" in r for r in found.remarks)
    assert found.unknown[0].startswith("whether anything was learned")
    assert "with norms that have seen enough data" in found.unknown[0]
    assert diagnose(noted(Training(wild, loss=constant(LOG)), FRESH, FEW)).word == "not learning"
    assert diagnose(noted(Training(wild, loss=constant(0.1)), FRESH, FEW)).word == "rich"


def test_buffers_that_moved_are_said() -> None:
    t = noted(Training(start=WILD), "", f"{MOVED_BUFFERS} (1.mean): ...", ("linearisation_gap", "feature_change_cka"))
    found = diagnose(t)
    assert found.word == "rich"
    assert any("what the buffers did that moved besides the weights" in line for line in found.unknown)
    assert any("not compared, because buffers of the network have moved since" in r for r in found.remarks)


def test_a_network_that_knew_the_answers_has_nothing_left_to_learn() -> None:
    start = {"probe_loss": 0.078, "probe_accuracy": 0.98}
    still = {"a": (0.02, 0.009), "z": (1.0, 0.009)}
    found = diagnose(Training({"probe_loss": 0.0705, "probe_accuracy": 0.984}, start, layers=still))
    assert found.word == "not learning"
    assert "nothing left to learn on this probe, where it began with a loss of 0.078 and an accuracy of 0.98" in found.verdict
    assert "learning rate" not in " ".join(found.advice)
    assert "has yet to learn" in found.advice[0]
    found = diagnose(Training({"probe_loss": 0.065, "probe_accuracy": 0.984}, start, layers=still))
    assert found.word == "early"
    assert "nothing left to learn" in found.verdict
    assert "train longer" not in found.advice[0]
    for other in ({"probe_loss": 0.3, "probe_accuracy": 0.98}, {"probe_loss": 0.078, "probe_accuracy": 0.8}):
        found = diagnose(Training({"probe_loss": 0.95 * other["probe_loss"], "probe_accuracy": 0.8}, other, layers=still))
        assert "nothing left" not in found.verdict
        assert "larger learning rate" in found.advice[0]


def test_guessing_how_frequent_classes_are_is_no_learning() -> None:
    """Of two classes, one of which has a tenth of the examples: the entropy is 0.325, log 2 is 0.693."""
    labels = Labels(256, 2, 0.9, -0.9 * math.log(0.9) - 0.1 * math.log(0.1))
    start = {"probe_loss": 0.654, "probe_accuracy": 0.906}
    for loss, fails in ((0.49, True), (0.402, True), (0.326, True), (0.324, False), (0.2, False)):
        found = diagnose(Training({"probe_loss": loss, "probe_accuracy": 0.9}, start, labels=labels))
        assert (found.word == "not learning") is fails, found.verdict
        if fails:
            assert f"the loss on the probe ({loss:.3g}) is no better than that of guessing (0.325)" in found.verdict
            assert "where a class is rare, weigh it" in found.advice[0]
    assert diagnose(Training({"probe_loss": 0.4, "probe_accuracy": 0.999}, start, labels=labels)).word == "rich"
    older = replace(labels, entropy=None)  # of a run that did not keep it
    assert diagnose(Training({"probe_loss": 0.402, "probe_accuracy": 0.9}, start, labels=older)).word == "rich"
    assert Labels.from_json(labels.to_json()) == labels
    for strange in (-1.0, 0.0, "x", 9.9, None):
        kept = Labels.from_json({**labels.to_json(), "entropy": strange})
        assert kept == older


def test_a_model_of_one_layer_is_its_own_linearisation() -> None:
    t = Training({"linearisation_gap": 3e-7, "feature_change_cka": math.nan, "magnitude": -3.0}, layers={"": (1.0, 0.9)})

    def with_gap(mark: Mark) -> Training:
        rows = tuple(replace(r, note=NO_HIDDEN) if r.measure == "feature_change_cka" else replace(r, mark=mark)
                     if r.measure == "linearisation_gap" else r for r in t.snapshots[-1].rows)
        t.snapshots[-1] = replace(t.snapshots[-1], rows=rows)
        return t

    found = diagnose(with_gap(Mark.BOUND))
    assert (found.word, found.magnitude, found.margin) == ("linear", None, None)
    assert "neither lazy nor rich" in found.verdict
    assert "its own linearisation" in found.verdict
    assert found.advice == ("to learn features, give the model a hidden layer.",)
    found = diagnose(with_gap(Mark.EXACT))  # something follows the layer
    assert found.word == "unknown"
    assert "there are no features to learn; what is not in the linearisation is what follows the one layer" in found.verdict


# ---------------------------------------------------------------------------------------------------------- what is read

@pytest.mark.parametrize(("names", "chosen"), [
    (["lr", "loss"], "loss"), (["train/loss", "val/loss"], "train/loss"), (["Loss/train", "Loss/val"], "Loss/train"),
    (["train_loss", "loss"], "loss"), (["val_loss", "test loss"], None), ([], None), (["training loss"], "training loss")])
def test_which_scalar_is_the_loss(names: list[str], chosen: str | None) -> None:
    assert loss_name(names) == chosen


def test_the_loss_is_smoothed() -> None:
    """The mean of the first twenty, then exponentially: by the definition, step by step."""
    values = np.random.default_rng(0).normal(3, 1, 5000).tolist()
    level = 0.0
    for k, v in enumerate(values, 1):
        level += max(0.05, 1 / k) * (v - level)
    loss = summary("loss", range(5000), values)
    assert loss is not None
    assert loss.smoothed == pytest.approx(level, rel=1e-12)
    few = summary("loss", range(5), values[:5])
    assert few is not None
    assert few.smoothed == pytest.approx(np.mean(values[:5]))
    assert summary("loss", [0], [1.0]) is None
    lost = summary("loss", [0, 5, 10, 15], [1.0, math.nan, math.inf, math.nan])
    assert lost is not None
    assert (lost.lost, lost.gaps) == (5, 0)


def test_a_negative_loss_has_no_ratio() -> None:
    assert word(loss=[-1.0, -2.0, -3.0]) == "rich"
    assert diagnose(Training({"probe_loss": -5.0}, {"probe_loss": -1.0})).word == "rich"  # the accuracy rose


def test_a_run_is_judged_as_it_was_watched(tmp_path: Path) -> None:
    """Rows, labels and scalars come back from disk; so does the verdict."""
    t = Training(loss=constant(0.3, n=120), reached=120)
    run = t.keep(tmp_path)
    assert [s.labels for s in run.snapshots] == [TEN, TEN]
    assert run.about["labels"] == {"count": 256, "classes": 10, "frequent": 0.1}
    assert diagnose(run) == diagnose(t)


@pytest.mark.parametrize("record", [
    None, 3, {}, {"count": 0, "classes": 10, "frequent": 0.1}, {"count": 5, "classes": "x", "frequent": 1},
    {"count": 5, "classes": 1, "frequent": 0.5}, {"count": 5, "classes": 2, "frequent": 1.0}])
def test_labels_of_strangers(record: Any) -> None:
    assert Labels.from_json(record) is None
    assert Labels.from_json(TEN.to_json()) == TEN


def test_it_is_told_to_machines() -> None:
    record = json.loads(json.dumps(diagnose(Training()).to_json(), allow_nan=False))
    assert record["word"] == "rich"
    assert record["step"] == 100
    assert record["magnitude"] == {"value": pytest.approx(0.368, abs=1e-3), "error": 0.01, "bound": False, "text": "0.368(10)"}
    assert record["margin"]["number"] == "linearisation_gap"
    assert record["margin"]["errors"] == pytest.approx(20)
    assert record["layers"]["c"]["verdict"] == "uncertain"
    assert {"remarks", "unknown", "evidence", "advice"} <= set(record)


def test_it_is_printed_whole() -> None:
    text = str(diagnose(Training({"feature_change_cka": 0.16}, {"probe_accuracy": 0.5}, reached=120)))
    for part in ("Verdict: rich, relative to the given start. The network no longer behaves like", "Remark: fine-tuning",
                 "Cannot tell whether", "measured at step 100; the verdict would become ", "Advice: ", "Magnitude: 0.368(10)",
                 "Evidence: the accuracy on the probe rose: 0.5 -> 0.95 (guessing: 0.1)"):
        assert part in text


def test_diagnose_opens_the_folder_of_a_run(tmp_path: Path) -> None:
    model, probe = mlp([4, 6, 3], seed=0), richter.Probe(torch.randn(80, 4, generator=torch.Generator().manual_seed(0)),
                                                         torch.arange(80) % 3)
    with richter.Observer(model, probe, run=tmp_path / "run", when=1, budget=None) as watch:
        watch(0, loss=1.2)
        with torch.no_grad():
            model[0].weight.mul_(1.5)
        watch(1, loss=1.0)
    for folder in (tmp_path / "run", str(tmp_path / "run")):
        assert str(richter.diagnose(folder)) == str(richter.diagnose(watch))
    with pytest.raises(StoreError, match=r"contains no run .* `richter runs FOLDER` lists the runs"):
        richter.diagnose(tmp_path)
    with pytest.raises(SelectionError, match="a Snapshot, an Observer, a Run or the folder of one, not int"):
        richter.diagnose(3)
