"""A model on a probe, to be measured again and again: what depends on the architecture alone is found out once."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from torch import Tensor, nn

from richter.core import CaptureError, Row, SelectionError, parse_bytes
from richter.instrument import evaluate
from richter.instrument.capture import Output, quiet, unwrap
from richter.instrument.checks import check_initial, check_weights
from richter.instrument.cotangents import Cotangents, Function, as_cotangents
from richter.instrument.evaluate import Evaluation, Plan
from richter.instrument.foreseen import MeasurementPlan, foreseen
from richter.instrument.probe import Probe
from richter.instrument.snapshot import Snapshot
from richter.instrument.statistics.frame import OutOfRange
from richter.instrument.subject import Subject
from richter.instrument.survey import MOST_DOUBTS, Doubt
from richter.measures.measure import Measure, resolve


class Measurement:
    """A model on a probe, to be measured again and again; options are those of ``measure``. What depends on the architecture
    alone is found out once. ``errors=False``: no standard errors, products in the model's own precision, and a plain model whose
    modules are the same is not looked at again: less work."""

    def __init__(self, model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
                 initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
                 layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
                 output: Output | None = None, mode: str = "eval", seed: int = 0, errors: bool = True) -> None:
        self.model, self.measures, self.cotangents = unwrap(model), resolve(measures), as_cotangents(cotangents)
        self.mode, self.seed = mode, seed
        self.plans: dict[tuple[str, ...], Plan] = {}  # by the measures that are taken together
        if not isinstance(probe, Probe):
            raise SelectionError(f"measure(model, probe): probe is a {type(probe).__name__}; make one with richter.Probe(x, y).")
        chosen = [layers] if isinstance(layers, str) else layers
        if chosen is not None and not callable(chosen) and not (isinstance(chosen, (list, tuple, set))
                                                                and all(isinstance(k, str) for k in chosen)):
            raise SelectionError(f"layers={layers!r}: names or patterns of layers are needed, e.g. 'h.0.*' or ['0', '2'].")
        check_weights(self.model)
        self.initial = None if initial is None else check_initial(self.model, initial)
        self.subject = Subject(self.model, probe, self.initial, chosen, parse_bytes(memory), output, errors)

    def take(self, step: int | None = None, matrices: int = 0, only: Collection[str] | None = None) -> Snapshot:
        """Measure the model as it is now. It is left exactly as it was. ``only``: names of some of the measures."""
        begun = time.perf_counter()
        self.subject.step = step
        check_weights(self.model)
        if self.subject.initial is not None:
            check_initial(self.model, self.subject.initial)
        with quiet(self.model, self.mode, self.seed):
            if self.subject.renew():
                self.plans.clear()
            work, rows = self._evaluated(step, matrices, [m for m in self.measures if only is None or m.name in only])
            labels = None if self.subject.objective is None else self.subject.objective.labels
        seconds = time.perf_counter() - begun
        return Snapshot(tuple(rows), step, work.notes, seconds, self.subject.probe.n, seconds / self.subject.pass_seconds,
                        work.arrays, labels)

    def plan(self) -> MeasurementPlan:
        """What ``take`` will do: steps, passes, bytes and seconds. Looks at a few examples only."""
        check_weights(self.model)
        with quiet(self.model, self.mode, self.seed):
            if self.subject.renew():
                self.plans.clear()
            return foreseen(self.subject, self._plan(self.measures))

    def _plan(self, measures: Sequence[Measure]) -> Plan:
        """Made once for an architecture."""
        names = tuple(m.name for m in measures)
        if names not in self.plans:
            self.plans[names] = evaluate.plan(self.subject, measures, self.cotangents)
        return self.plans[names]

    def _evaluated(self, step: int | None, matrices: int, measures: Sequence[Measure]) -> tuple[Evaluation, list[Row]]:
        """Until nothing that was captured is in doubt: each time a map is, it is read in another way, or refused. What leaves the
        range of single precision is computed in double."""
        for left in range(MOST_DOUBTS, -1, -1):
            try:
                work = Evaluation(self.subject, self._plan(measures), step, matrices)
                return work, work.rows()
            except CaptureError as why:
                if not left or not (self.subject.memo.trusted or isinstance(why, Doubt)):
                    raise
                self.plans.clear()
                if isinstance(why, Doubt) and not self.subject.memo.trusted:
                    self.subject.amend(why)
                else:
                    self.subject.renew(look=True)  # what was known of the model may not hold any longer
            except OutOfRange:
                self.plans.clear()
                self.subject.widen()
        raise AssertionError("the last doubt is raised")


def plan(model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
         initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
         layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
         output: Output | None = None, mode: str = "eval", seed: int = 0) -> MeasurementPlan:
    """What ``richter.measure`` with the same arguments will do: which measures together, passes, bytes and seconds. Runs a few
    examples only.

    >>> print(richter.plan(model, probe))
    """
    return Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers, memory=memory,
                       output=output, mode=mode, seed=seed).plan()
