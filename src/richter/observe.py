"""Measure a model once (``measure``) or while it trains (``Observer``), without changing the training by one bit."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from torch import Tensor, nn

from richter.capture import Output, quiet, unwrap
from richter.checks import check_initial, check_weights
from richter.core import WHOLE, RichterError, SelectionError, parse_bytes
from richter.cotangents import Cotangents
from richter.evaluate import Evaluation
from richter.measures import Measure, resolve
from richter.probe import Probe
from richter.snapshot import Snapshot
from richter.subject import Subject

if TYPE_CHECKING:
    import pandas

Schedule = Callable[[int], bool]
When = SupportsIndex | Iterable[SupportsIndex] | Schedule  # every so many steps, these steps, or a rule


def measure(model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
            initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | None = None,
            layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
            output: Output | None = None, mode: str = "eval", seed: int = 0, step: int | None = None) -> Snapshot:
    """Measure ``model`` on ``probe``, layer by layer. The model is left exactly as it was.

    >>> snap = richter.measure(model, richter.Probe(x, y))
    >>> snap.value("nfc", "0"), snap.frame

    ``initial``: a state_dict at initialisation, for centred measures; ``layers``: names or patterns ("h.*.attn.*");
    ``output``: picks the tensor from what the model returns; ``memory`` bounds what is used beyond the result;
    ``mode="train"`` keeps dropout on, drawn from a generator of its own seeded by ``seed``.
    """
    begun = time.perf_counter()
    model, chosen, bytes_ = unwrap(model), resolve(measures), parse_bytes(memory)
    if not isinstance(probe, Probe):
        raise SelectionError(f"measure(model, probe): probe is a {type(probe).__name__}; make one with richter.Probe(x, y).")
    check_weights(model)
    initial = None if initial is None else check_initial(model, initial)
    wanted = [layers] if isinstance(layers, str) else layers
    if wanted is not None and not callable(wanted) and not (isinstance(wanted, (list, tuple, set))
                                                            and all(isinstance(k, str) for k in wanted)):
        raise SelectionError(f"layers={layers!r}: names or patterns of layers are needed, e.g. 'h.0.*' or ['0', '2'].")
    with quiet(model, mode, seed):
        subject = Subject(model, probe, initial, wanted, bytes_, output)
        work = Evaluation(subject, chosen, cotangents, step)
        rows = work.rows()
    seconds = time.perf_counter() - begun
    return Snapshot(tuple(rows), step, work.notes, seconds, probe.n, seconds / subject.pass_seconds)


def every(k: SupportsIndex) -> Schedule:
    """Every ``k`` steps."""
    k = _whole(k)
    if k < 1:
        raise SelectionError(f"when={k}: a positive number of steps is needed.")
    return lambda step: step % k == 0


def epochs(steps_per_epoch: Any, every_epochs: int = 1) -> Schedule:
    """At the start of every epoch; ``steps_per_epoch`` is a number, or a DataLoader."""
    return every((steps_per_epoch if isinstance(steps_per_epoch, int) else len(steps_per_epoch)) * every_epochs)


def log_spaced(last: int, count: int = 20) -> Schedule:
    """0 and about ``count`` steps, evenly spaced in the logarithm up to ``last``: where features move is early."""
    if last < 1 or count < 2:
        raise SelectionError(f"log_spaced({last}, {count}): a last step and at least two points are needed.")
    chosen = {0} | {round(math.exp(math.log(last) * i / (count - 1))) for i in range(count)}
    return chosen.__contains__


def schedule(when: When) -> Schedule:
    if callable(when):
        return when
    if isinstance(when, Iterable):
        return {_whole(step) for step in when}.__contains__
    return every(when)


def _whole(step: Any) -> int:
    try:
        return operator.index(step)
    except TypeError:
        raise SelectionError(f"when={step!r}: a number of steps, a list of steps or a function of the step is needed.") from None


class Observer:
    """Watch a model while it trains: call it anywhere in the loop; it measures when its schedule says so.

    >>> watch = richter.Observer(model, probe, when=50)
    >>> for step, (x, y) in enumerate(loader):
    ...     ...
    ...     watch(step, loss=loss)
    >>> watch.frame

    ``when``: every so many steps, a list of steps, or a callable (``richter.log_spaced(last)``,
    ``richter.epochs(loader)``); the first call always measures. ``budget``: the share of wall time that measuring may
    take after the first measurement; a step that is due and has no budget is put off until there is some, and the room of
    one measurement is kept for ``watch.now(step)``, which measures regardless, e.g. after the last step. None: no limit.
    ``watch.share`` is the share that was taken. Everything else is as in ``richter.measure``.
    """

    def __init__(self, model: nn.Module, probe: Probe, *, run: str | None = None,
                 when: When = 100, measures: Iterable[str | Measure] | None = None,
                 initial: Mapping[str, Tensor] | None = None, budget: float | None = 0.05, **options: Any) -> None:
        if run is not None:
            raise RichterError(f"run={str(run)!r}: runs cannot be stored yet in this version. Leave run= out: rows are kept in "
                               f"memory, and watch.frame.to_csv(...) saves them.")
        if budget is not None and not (isinstance(budget, (int, float)) and 0 < budget <= 1):
            raise SelectionError(f"budget={budget}: a share of wall time in (0, 1], or None for no limit.")
        self.model, self.probe = unwrap(model), probe
        self.measures = resolve(measures)
        self.when, self.budget, self.options = schedule(when), budget, options
        check_weights(self.model)
        given = check_initial(self.model, initial) if initial is not None else self.model.state_dict()
        with torch.inference_mode(False):
            self.initial = {k: v.detach().clone() for k, v in given.items() if isinstance(v, Tensor)}
        self.snapshots: list[Snapshot] = []
        self.put_off: list[int] = []  # steps that were due and had no budget
        self._scalars: list[dict[str, float]] = []
        self._owed = False
        self._begun: float | None = None
        self._spent = 0.0

    def __call__(self, step: int, **scalars: Any) -> Snapshot | None:
        """Keep the scalars, and measure if this step is due. Returns the snapshot, if one was taken."""
        self._begun = time.perf_counter() if self._begun is None else self._begun
        if scalars:
            self._scalars.append({"step": step, **{k: float(v.detach() if isinstance(v, Tensor) else v)
                                                   for k, v in scalars.items()}})
        return self.now(step) if not self.snapshots or self._due(step) else None

    def now(self, step: int) -> Snapshot:
        """Measure at once, whatever the schedule and the budget say."""
        start = time.perf_counter()
        self._begun = start if self._begun is None else self._begun
        self._owed = False
        try:
            snap = measure(self.model, self.probe, self.measures, initial=self.initial, step=step, **self.options)
        finally:
            self._spent += time.perf_counter() - start
        self.snapshots.append(snap)
        return snap

    def _due(self, step: int) -> bool:
        due = self.when(step)
        if not (due or self._owed):
            return False
        if self.budget is None or self._begun is None:
            return True
        first = self.snapshots[0].seconds  # not optional, and it pays for what is loaded once
        elapsed = time.perf_counter() - self._begun
        expected = self.snapshots[-1].seconds if len(self.snapshots) > 1 else first / 5  # a guess, until there is a second
        if self._spent - first + 2 * expected <= self.budget * (elapsed - first + expected):  # one in reserve, for now()
            return True
        if due:
            self.put_off.append(step)
        self._owed = True
        return False

    @property
    def share(self) -> float:
        """The share of wall time that went into measuring, since the first measurement (which is not optional, and pays for
        what is loaded once)."""
        if self._begun is None or not self.snapshots:
            return 0.0
        first = self.snapshots[0].seconds
        return (self._spent - first) / (time.perf_counter() - self._begun - first)

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows so far: step, layer, measure, value, error, note."""
        import pandas as pd
        return pd.DataFrame([tuple(r) for s in self.snapshots for r in s.rows],
                            columns=["step", "layer", "measure", "value", "error", "note"])

    @property
    def scalars(self) -> pandas.DataFrame:
        """What was passed beside the steps: loss, accuracy, ..."""
        import pandas as pd
        return pd.DataFrame(self._scalars)

    def curve(self, name: str, layer: str = WHOLE) -> tuple[list[int], list[float]]:
        """Steps and values of one measure of one layer."""
        return [s.step or 0 for s in self.snapshots], [s.value(name, layer) for s in self.snapshots]

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, *exc: Any) -> None:
        return None
