"""Measure a model once (``measure``) or while it trains (``Observer``), without changing the training by one bit."""

from __future__ import annotations

import math
import operator
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, SupportsIndex

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from richter.core import WHOLE, Row, SelectionError, StoreError, parse_bytes
from richter.instrument.capture import Output, quiet, unwrap
from richter.instrument.checks import check_initial, check_weights
from richter.instrument.cotangents import Cotangents, Function, as_cotangents
from richter.instrument.evaluate import Evaluation, Plan, plan
from richter.instrument.probe import Probe
from richter.instrument.snapshot import Snapshot
from richter.instrument.subject import Subject
from richter.instrument.survey import Doubt
from richter.measures.cards import CARDS
from richter.measures.measure import Measure, resolve
from richter.runs import Writer, create

if TYPE_CHECKING:
    import pandas

Schedule = Callable[[int], bool]
MATRICES = 256  # inputs; feature matrices of larger layers are not kept in a run unless asked for
When = SupportsIndex | Iterable[SupportsIndex] | Schedule  # every so many steps, these steps, or a rule


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
        self.plan: Plan | None = None
        if not isinstance(probe, Probe):
            raise SelectionError(f"measure(model, probe): probe is a {type(probe).__name__}; make one with richter.Probe(x, y).")
        chosen = [layers] if isinstance(layers, str) else layers
        if chosen is not None and not callable(chosen) and not (isinstance(chosen, (list, tuple, set))
                                                                and all(isinstance(k, str) for k in chosen)):
            raise SelectionError(f"layers={layers!r}: names or patterns of layers are needed, e.g. 'h.0.*' or ['0', '2'].")
        check_weights(self.model)
        self.initial = None if initial is None else check_initial(self.model, initial)
        self.subject = Subject(self.model, probe, self.initial, chosen, parse_bytes(memory), output, errors)

    def take(self, step: int | None = None, matrices: int = 0) -> Snapshot:
        """Measure the model as it is now. It is left exactly as it was."""
        begun = time.perf_counter()
        check_weights(self.model)
        if self.subject.initial is not None:
            check_initial(self.model, self.subject.initial)
        with quiet(self.model, self.mode, self.seed):
            if self.subject.renew():
                self.plan = None
            work, rows = self._evaluated(step, matrices)
        seconds = time.perf_counter() - begun
        return Snapshot(tuple(rows), step, work.notes, seconds, self.subject.probe.n, seconds / self.subject.pass_seconds,
                        work.arrays)

    def _evaluated(self, step: int | None, matrices: int) -> tuple[Evaluation, list[Row]]:
        """Until nothing that was captured is in doubt: each time a map is, it is read in another way, or refused."""
        while True:
            try:
                if self.plan is None:
                    self.plan = plan(self.subject, self.measures, self.cotangents)
                work = Evaluation(self.subject, self.plan, step, matrices)
                return work, work.rows()
            except Doubt as doubt:
                self.plan = None
                self.subject.amend(doubt)


def measure(model: nn.Module, probe: Probe, measures: Iterable[str | Measure] | None = None, *,
            initial: Mapping[str, Tensor] | None = None, cotangents: Cotangents | Function | None = None,
            layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
            output: Output | None = None, mode: str = "eval", seed: int = 0, step: int | None = None,
            matrices: int = 0) -> Snapshot:
    """Measure ``model`` on ``probe``, layer by layer. The model is left exactly as it was.

    >>> snap = richter.measure(model, richter.Probe(x, y))
    >>> snap.value("nfc", "0"), snap.frame

    ``initial``: a state_dict at initialisation, for centred measures; ``layers``: names or patterns ("h.*.attn.*");
    ``output``: picks the tensor from what the model returns; ``memory`` bounds what is used beyond the result;
    ``mode="train"`` keeps dropout on, drawn from a generator of its own seeded by ``seed``; ``matrices``: also keep the
    feature matrices themselves (``snap.arrays["0", "nfm"]``, ``"agop"``) of layers with at most so many inputs.
    """
    return Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers, memory=memory,
                       output=output, mode=mode, seed=seed).take(step, matrices)


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
    ``watch.share`` is the share that was taken. (Scalars are the user's own logging and come on top: some 50 microseconds a call
    with a run, so that none is lost.)

    ``run="runs/demo"`` keeps everything on disk as it is measured: rows, scalars, the initial weights, the feature matrices of
    layers with at most ``matrices`` inputs (whenever the step has grown by a tenth), and ``settings`` (a dataclass or mapping of
    yours). After a crash ``resume=True`` goes on with the run and its initial weights. Of several ranks the first writes.
    Everything else is as in ``richter.measure``.
    """

    def __init__(self, model: nn.Module, probe: Probe, *, run: str | os.PathLike[str] | Writer | None = None,
                 settings: Any = None, resume: bool = False, matrices: int | None = None,
                 when: When = 100, measures: Iterable[str | Measure] | None = None,
                 initial: Mapping[str, Tensor] | None = None, budget: float | None = 0.05,
                 cotangents: Cotangents | Function | None = None,
                 layers: str | Sequence[str] | Callable[[str], bool] | None = None, memory: str | float = "2GiB",
                 output: Output | None = None, mode: str = "eval", seed: int = 0) -> None:
        if budget is not None and not (isinstance(budget, (int, float)) and 0 < budget <= 1):
            raise SelectionError(f"budget={budget}: a share of wall time in (0, 1], or None for no limit.")
        self.when, self.budget = schedule(when), budget
        if matrices is not None and matrices < 0:
            raise SelectionError(f"matrices={matrices}: the most inputs that a layer whose matrices are kept may have; 0: none.")
        self.matrices = matrices if matrices is not None else MATRICES if run is not None else 0
        self.measurement = Measurement(model, probe, measures, initial=initial, cotangents=cotangents, layers=layers,
                                       memory=memory, output=output, mode=mode, seed=seed)
        self.model, self.probe, self.measures = self.measurement.model, probe, self.measurement.measures
        given = self.model.state_dict() if self.measurement.initial is None else self.measurement.initial
        with torch.inference_mode(False):
            self.initial = {k: v.detach().clone() for k, v in given.items() if isinstance(v, Tensor)}
        self.snapshots: list[Snapshot] = []
        self.put_off: list[int] = []  # steps that were due and had no budget
        self._scalars: list[dict[str, float]] = []
        self._owed = False
        self._begun: float | None = None
        self._spent = 0.0
        self._first: float | None = None  # seconds of this process's first measurement; a resumed run has earlier ones
        self._last: float | None = None  # of the last, if it is another
        self._drawn: int | None = None  # the last step whose matrices were kept
        self._owns = not isinstance(run, Writer)
        if run is None and (settings is not None or resume):
            raise SelectionError("settings= and resume= are of a run on disk: say which by run='runs/...'.")
        self.writer: Writer | None = None
        if run is not None:
            self._open(run, settings, resume, initial is not None)
        self.measurement.subject.initial = self.initial

    def _open(self, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, given: bool) -> None:
        """The first rank opens the run; the others have its initial weights and earlier measurements, or its error."""
        subject = self.measurement.subject
        message: list[Any] = [None]
        if _rank() == 0:
            try:
                self.writer = self._opened(run, settings, resume, given)
            except Exception as why:
                message = [why]
        if _ranks() > 1:
            message = [message[0] or ({k: v.cpu() for k, v in self.initial.items()}, self.snapshots, subject.previous)]
            torch.distributed.broadcast_object_list(message, src=0)
        if isinstance(message[0], Exception):
            raise message[0]
        if _rank() and message[0] is not None:
            initial, self.snapshots, previous = message[0]
            self.initial = {k: v.to(self.initial[k].device) for k, v in initial.items()}
            subject.previous = {k: v.to(subject.home) for k, v in previous.items()}

    def _opened(self, run: str | os.PathLike[str] | Writer, settings: Any, resume: bool, given: bool) -> Writer:
        """The run that is written; one that was begun before hands over its initial weights and measurements."""
        writer = run if isinstance(run, Writer) else create(run, settings, resume=resume)
        try:
            if writer.observer is not None:
                raise SelectionError(f"another Observer writes to the run {writer.path}; their rows would replace each other. "
                                     f"Give each a run of its own.")
            kept = writer.run.initial
            if kept is None:
                writer.keep_state(lambda path: save_file({k: v.contiguous() for k, v in self.initial.items()}, path))
            elif given:
                raise SelectionError(f"the run {writer.path} has initial weights of its own; leave initial= out to resume it.")
            else:
                self.initial = _fitting(self.model, load_file(kept), writer.path)
            self.snapshots = writer.run.snapshots
            if (before := writer.run.state("previous")) is not None:
                device = self.measurement.subject.home
                self.measurement.subject.previous = {key: t.to(device) for key, t in load_file(before).items()}
            writer.observer = self
            writer.describe(model=type(self.model).__name__, parameters=sum(p.numel() for p in self.model.parameters()),
                            examples=self.probe.n, budget=self.budget, measures=[m.name for m in self.measures],
                            cards={m.name: card.to_json() for m in self.measures if (card := m.card or CARDS.get(m.name))})
        except BaseException:
            if self._owns:
                writer.close()
            raise
        return writer

    def __call__(self, step: int, **scalars: Any) -> Snapshot | None:
        """Keep the scalars, and measure if this step is due. Returns the snapshot, if one was taken."""
        self._begun = time.perf_counter() if self._begun is None else self._begun
        if scalars:
            values = {k: float(v.detach() if isinstance(v, Tensor) else v) for k, v in scalars.items()}
            if self.writer is not None:
                self.writer.scalars(step, values)
            else:
                self._scalars.append({"step": step, **values})
        return self._measured(step, self._draws(step)) if self._first is None or self._due(step) else None

    def now(self, step: int) -> Snapshot:
        """Measure at once, whatever the schedule and the budget say."""
        return self._measured(step, self.matrices)

    def _draws(self, step: int) -> int:
        """Matrices are kept when the step has grown by a tenth: about 25 times in a decade, however often it is measured."""
        return self.matrices if self._drawn is None or step >= 1.1 * self._drawn or step < self._drawn else 0

    def _measured(self, step: int, matrices: int) -> Snapshot:
        if self.writer is not None and self.writer.closed:
            raise StoreError(f"the run {self.writer.path} was closed: nothing more is measured into it. resume=True opens it.")
        start = time.perf_counter()
        self._begun = start if self._begun is None else self._begun
        self._owed = False
        try:
            snap = self.measurement.take(step, matrices)
            self._drawn = step if matrices else self._drawn
            if self.writer is not None:
                self.writer.snapshot(snap)
                snap = replace(snap, arrays={})  # they are on disk
            self._hand_on()
        finally:
            seconds = time.perf_counter() - start  # with writing it down
            self._spent += seconds
        self._first, self._last = (seconds, None) if self._first is None else (self._first, seconds)
        others = [s for s in self.snapshots if s.step != step]  # a step that is measured again replaces
        self.snapshots = sorted([*others, snap], key=lambda s: s.step or 0)
        return snap

    def _hand_on(self) -> None:
        """What the next snapshot wants to know of this one; numbers and tensors also in the run."""
        subject = self.measurement.subject
        subject.previous = subject.carried
        tensors = {key: value.cpu().contiguous() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
                   for key, value in subject.carried.items() if isinstance(value, (Tensor, float, int))}
        if tensors and self.writer is not None:
            self.writer.keep_state(lambda path: save_file(tensors, path), "previous")

    def _due(self, step: int) -> bool:
        due = self.when(step)
        if not (due or self._owed):
            return False
        if self.budget is None or self._begun is None or self._first is None:
            return True
        first = self._first  # not optional, and it pays for what is loaded once
        elapsed = time.perf_counter() - self._begun
        expected = first / 5 if self._last is None else self._last  # a guess, until there is a second
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
        if self._begun is None or self._first is None:
            return 0.0
        return (self._spent - self._first) / (time.perf_counter() - self._begun - self._first)

    @property
    def frame(self) -> pandas.DataFrame:
        """All rows so far: step, layer, measure, value, error, note, mark (a word of ``richter.core.Mark``)."""
        import pandas as pd
        return pd.DataFrame([tuple(r) for s in self.snapshots for r in s.rows],
                            columns=["step", "layer", "measure", "value", "error", "note", "mark"])

    @property
    def scalars(self) -> pandas.DataFrame:
        """What was passed beside the steps: loss, accuracy, ..."""
        import pandas as pd
        return pd.DataFrame(self._scalars) if self.writer is None else self.writer.run.scalars

    def curve(self, name: str, layer: str = WHOLE) -> tuple[list[int], list[float]]:
        """Steps and values of one measure of one layer."""
        return [s.step or 0 for s in self.snapshots], [s.value(name, layer) for s in self.snapshots]

    def close(self) -> None:
        """Finish the run on disk, if it is the Observer's own. The end of the process does so too."""
        if self.writer is not None and self._owns:
            self.writer.finish()

    def __enter__(self) -> Observer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.writer is not None and self._owns:
            self.writer.__exit__(kind, error, trace)


def _ranks() -> int:
    """Processes that train one model together."""
    return torch.distributed.get_world_size() if torch.distributed.is_available() and torch.distributed.is_initialized() else 1


def _rank() -> int:
    return torch.distributed.get_rank() if _ranks() > 1 else 0


def _fitting(model: nn.Module, kept: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The initial weights of a run, if they are of this architecture."""
    own = {k: tuple(v.shape) for k, v in model.state_dict().items() if isinstance(v, Tensor)}
    other = {k: tuple(v.shape) for k, v in kept.items()}
    if own != other:
        name = next(k for k in {**own, **other} if own.get(k) != other.get(k))
        raise SelectionError(f"the run {path} was begun with another architecture: {name!r} has shape "
                             f"{own.get(name, 'none')} in this model and {other.get(name, 'none')} in the run. A run is of one "
                             f"model; choose another name for this one.")
    return {k: v.to(model.state_dict()[k].device) for k, v in kept.items()}
