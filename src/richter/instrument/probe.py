"""The fixed examples on which a model is measured: ``Probe``."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from richter.core import Labels, ProbeError
from richter.instrument.capture import Inputs, copy_of, forward
from richter.instrument.stream import count, select
from richter.instrument.survey import Network

# ------------------------------------------------------------------------------------------------------------- targets
# Targets of class or token ids where there are too many to be written down: rows of them are made when they are asked for.

WRITTEN = 2 ** 26  # bytes: smaller targets are plain tensors


class OneHot:
    """The tensor "n k" that has a 1 where each token's class is, and 0 elsewhere. ``Y[rows]`` is a tensor, in double precision;
    whatever else is asked of a tensor is asked of the whole, which is then made."""

    def __init__(self, ids: Int[Tensor, "n t"], real: Bool[Tensor, "n t"], classes: int) -> None:
        self.ids, self.real, self.classes = ids, real, classes
        self.shape = torch.Size((len(ids), ids.shape[1] * classes))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, rows: Any) -> Float[Tensor, "m k"]:
        ids, real = self.ids[rows], self.real[rows]
        hot = torch.zeros(*ids.shape, self.classes, dtype=torch.float64, device=ids.device)
        return hot.scatter_(-1, ids[..., None], real[..., None].double()).flatten(1)

    def numel(self) -> int:
        return self.shape.numel()

    @property
    def device(self) -> torch.device:
        return self.ids.device

    def take(self, rows: Any) -> OneHot:
        """The same of some examples."""
        return OneHot(self.ids[rows], self.real[rows], self.classes)

    def labelled(self, rows: Any) -> Bool[Tensor, " k"]:
        """Which outputs are the label of some of these examples."""
        some = torch.zeros(self.ids.shape[1], self.classes, dtype=torch.bool, device=self.ids.device)
        ids, real = self.ids[rows], self.real[rows]
        some[torch.arange(ids.shape[1], device=ids.device).expand_as(ids)[real], ids[real]] = True
        return some.flatten()

    def counts(self, rows: Any, groups: int) -> tuple[Int[Tensor, " m"], Float[Tensor, "m g"]]:
        """Outputs that are the label of some of these examples, and of how many in each group."""
        ids, real = self.ids[rows].cpu(), self.real[rows].cpu()
        outputs = (torch.arange(ids.shape[1]) * self.classes + ids)[real]
        group = (torch.arange(len(ids)) % groups)[:, None].expand_as(ids)[real]
        known, place = torch.unique(outputs, return_inverse=True)
        labels = torch.zeros(len(known), groups, dtype=torch.float64)
        return known, labels.index_put_((place, group), torch.ones((), dtype=torch.float64), accumulate=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("ids", "real", "classes", "shape"):  # while it is copied it has none of them yet
            raise AttributeError(name)
        return getattr(self[:], name)


def labelled(Y: Tensor | OneHot, rows: Tensor) -> Bool[Tensor, " k"]:
    """Which outputs are not 0 in some of these rows."""
    return Y.labelled(rows) if isinstance(Y, OneHot) else (Y[rows] != 0).any(0)


def counts(Y: Tensor | OneHot, rows: Tensor, groups: int) -> tuple[Int[Tensor, " m"], Float[Tensor, "m g"]] | None:
    """Outputs that are the label of some of these rows, and of how many in each group of them; None where labels are numbers and
    not classes, of which a row has 1 or 0."""
    if isinstance(Y, OneHot):
        return Y.counts(rows, groups)
    y = Y[rows].cpu().double()
    if not bool(((y == 0) | (y == 1)).all()):
        return None
    known = y.any(0).nonzero().flatten()
    return known, torch.stack([y[g::groups, known].sum(0) for g in range(groups)], 1)


def columns(Y: Any, rows: Int[Tensor, " n"], outputs: Int[Tensor, " v"]) -> Float[Tensor, "n v"]:
    """Of some rows some outputs; ones where there are no labels. Rows are made one after another where there are too many to be
    written down."""
    if Y is None:
        return torch.ones(len(rows), len(outputs), dtype=torch.float64)
    return torch.cat([(row := Y[rows[i:i + 1]])[:, outputs.to(row.device)] for i in range(len(rows))])


# ------------------------------------------------------------------------------------------------------------- loaders
# Batches from whatever gives examples (a DataLoader, a Dataset, a Hugging Face dataset, a list), random streams left alone.

@contextlib.contextmanager
def undisturbed(loader: Any, seed: int) -> Iterator[None]:
    """Iterating may draw: from the global streams of torch, numpy and Python, and from the loader's own generators."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    own = [g for g in (getattr(owner, "generator", None) for owner in owners) if isinstance(g, torch.Generator)]
    states = [(g, g.get_state()) for g in own]
    numpy_state, python_state = np.random.get_state(), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every device
            np.random.seed(seed)  # noqa: NPY002
            random.seed(seed)
            yield
    finally:
        for g, state in states:
            g.set_state(state)
        np.random.set_state(numpy_state)  # noqa: NPY002
        random.setstate(python_state)


def batches(loader: Any, seed: int) -> Iterable[Any]:
    """A DataLoader, or any iterable of batches, is iterated as it is; a dataset is shuffled with a seed of its own."""
    indexed = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    in_batches = isinstance(loader, (list, tuple)) and len(loader) and _is_batch(loader[0])
    if isinstance(loader, torch.utils.data.DataLoader) or not indexed or not len(loader) or in_batches:
        return loader
    draw = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(loader, batch_size=64, shuffle=True, generator=draw, collate_fn=_collate)


def _is_batch(item: Any) -> bool:
    """Is this a batch, or one example? A batch has inputs of two axes or more, and as many labels as inputs."""
    if isinstance(item, (Tensor, np.ndarray)):
        return False
    x, y = pair(item)
    arrays = list(x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else [x])
    if not arrays or not all(isinstance(t, (Tensor, np.ndarray)) and t.ndim >= 2 for t in arrays):
        return False
    return y is None or (isinstance(y, (Tensor, np.ndarray)) and y.ndim >= 1 and len(y) == len(arrays[0]))


def _collate(rows: list[Any]) -> Any:
    """Examples side by side, lists of numbers (as a plain Hugging Face dataset has them) as arrays."""
    first = rows[0]
    if isinstance(first, Mapping):
        return {k: _collate([row[k] for row in rows]) for k in first}
    if isinstance(first, tuple) or (isinstance(first, list) and first and isinstance(first[0], (Tensor, np.ndarray))):
        return tuple(_collate([row[i] for row in rows]) for i in range(len(first)))
    return torch.stack(rows) if isinstance(first, Tensor) else np.stack([np.asarray(row) for row in rows])


def pair(batch: Any) -> tuple[Any, Any]:
    """(x, y) of one batch: a pair, or a dict with its labels under a usual name."""
    if isinstance(batch, Mapping):
        batch = {k: _stacked(v) for k, v in batch.items()}
        label = next((k for k in ("labels", "label", "y", "target", "targets") if k in batch), None)
        rest = {k: v for k, v in batch.items() if k != label}
        if len(rest) == 1 and "input_ids" not in rest:
            rest = next(iter(rest.values()))
        return rest, None if label is None else batch[label]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, (tuple, list)) and len(batch) > 2:
        return tuple(batch[:-1]), batch[-1]
    return (batch[0] if isinstance(batch, (tuple, list)) else batch), None


def _stacked(v: Any) -> Any:
    """torch's default collation turns n lists of d numbers into d tensors of n: put them together again."""
    columns = isinstance(v, (list, tuple)) and len(v) and all(isinstance(t, Tensor) and t.dim() == 1 for t in v)
    return torch.stack(list(v), 1) if columns else v


# --------------------------------------------------------------------------------------------------------------- probe

IGNORE_INDEX = -100  # as in torch.nn.functional.cross_entropy


@dataclass(frozen=True, eq=False)
class Probe:
    """A fixed set of examples, the same at every measurement.

    >>> Probe(x, y)                                   # tensors or arrays; y: class ids [n], targets [n,k]
    >>> Probe({"input_ids": ids}, tokens, mask=real)  # y: token ids [n,T], -100 where there is no label
    >>> Probe.from_loader(loader, n=256)              # balanced over classes, drawn with a seed of its own

    ``chunk`` examples go through the model at a time; ``kernel`` class-balanced examples enter tangent kernels (None:
    all); ``mask`` [n,T] is True at real tokens: masked positions enter no sum. ``y=None``: no measure that needs labels.
    ``loss(f, y)`` and ``weight_decay`` are what the network was trained with, for measures of features at convergence (None:
    cross-entropy for ids, squared error for targets); see objective.py. ``held_out=(x2, y2)``: examples of the same kind on which
    features are evaluated that were fitted on the others (a Probe, if they need a mask of their own).

    Token labels stand beside the outputs that predict them: of a language model ``y[:, t]`` is ``ids[:, t + 1]``.
    ``shift=True``: they are given as Hugging Face's ``labels=input_ids`` and are moved there (``y`` is then what was moved, and
    ``shift`` False). ``shift=False``: they are where they belong. ``shift=None``: the same, unless they equal the input ids. Then
    a model that moves ``labels`` in its own loss has them moved, and the snapshot says so; one that compares them in place (a
    masked language model) has them as they are; where the model has no loss to be asked, you are, by an error.

    Tensors are copied: a probe stays the same whatever becomes of yours.
    """

    x: Any
    y: Tensor | None
    chunk: int = 256
    kernel: int | None = 64
    held_out: Any = None
    mask: Tensor | None = None
    ignore_index: int = IGNORE_INDEX
    loss: Callable[..., Any] | None = None
    weight_decay: float = 0.0
    shift: bool | None = None
    n: int = field(init=False)
    _loose: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        put = lambda name, value: object.__setattr__(self, name, value)  # noqa: E731  the dataclass is frozen
        put("_loose", _is_loose(self.x))
        put("x", copy_of(_tensors(self.x, "x")))
        put("y", None if self.y is None else _labels(self.y).clone())
        put("mask", None if self.mask is None else _tensors(self.mask, "mask").bool().clone())
        put("n", _examples(self.x))
        for name in ("chunk", "kernel"):
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not (value is None and name == "kernel") and (not whole or value < 1):
                raise ProbeError(f"Probe({name}={value!r}): a positive whole number is needed.")
        if self.loss is not None and not callable(self.loss):
            raise ProbeError(f"Probe(loss={self.loss!r}): a function loss(f, y) is needed, e.g. torch.nn.MSELoss().")
        decay = self.weight_decay
        if isinstance(decay, bool) or not isinstance(decay, (int, float, np.number)) or not 0 <= decay < math.inf:
            raise ProbeError(f"Probe(weight_decay={decay!r}): the objective is loss + weight_decay/2 |weights|^2, so a number "
                             f"that is not negative is needed, the one that the optimiser has.")
        if self.n == 0:
            raise ProbeError("the probe is empty: x holds no example. Give a few hundred inputs the model was not built for "
                             "memorising, e.g. Probe(x[:256], y[:256]).")
        if self.n == 1:
            raise ProbeError("the probe has one example; averages and kernels over examples need at least two "
                             "(a few hundred give small error bars).")
        if self.kernel is not None and self.kernel < 2:
            raise ProbeError("Probe(kernel=1): a kernel needs at least two examples.")
        if self.mask is not None and (self.mask.dim() != 2 or self.mask.shape[0] != self.n):
            raise ProbeError(f"mask has shape {tuple(self.mask.shape)} for {self.n} examples; [n, T] is needed, True at real "
                             f"tokens.")
        if self.mask is not None and not self.mask.any():
            raise ProbeError("mask is False everywhere, so no position is left to be measured.")
        shift = self.shift
        if not (shift is None or isinstance(shift, bool)):
            raise ProbeError(f"Probe(shift={shift!r}): True (labels=input_ids, as Hugging Face takes them), False (each label "
                             f"beside the output that predicts it) or None.")
        if shift:
            put("y", self._moved())
            put("shift", False)  # it has been done
        if self.y is not None:
            self._check_labels(self.y)
        if self.held_out is not None:
            put("held_out", self._aside(self.held_out, shift))

    def _aside(self, given: Any, shift: bool | None) -> Probe:
        """The held-out examples as a probe of their own, with the same settings."""
        if not isinstance(given, Probe):
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise ProbeError(f"Probe(held_out=...) is a {type(given).__name__}; a pair (x2, y2) is needed, of examples like "
                                 f"those of the probe.")
            x, y = given
            given = Probe(x, y, chunk=self.chunk, kernel=self.kernel, ignore_index=self.ignore_index, loss=self.loss,
                          weight_decay=self.weight_decay, shift=shift)
        mine, other = (_kind(p.x) for p in (self, given))
        if mine != other or (given.y is None) != (self.y is None):
            raise ProbeError(f"Probe(held_out=...) holds other things than the probe: inputs {other} beside {mine}"
                             f"{'' if (given.y is None) == (self.y is None) else ', and labels in one of them only'}. Both go "
                             f"through the same model.")
        return given

    def shifted(self) -> Probe:
        """The same examples, each label beside the output before it."""
        other = copy.copy(self)
        object.__setattr__(other, "y", self._moved())
        object.__setattr__(other, "shift", False)
        return other

    def _moved(self) -> Tensor:
        """y[:, t + 1] at t; none at the end, and none where it is that of a masked token."""
        y = self.y
        if y is None or y.is_floating_point() or y.dim() != 2 or y.shape[1] < 2:
            raise ProbeError(f"Probe(shift=True) moves token ids [n, T] by one, T > 1; y "
                             f"{'is None' if y is None else f'has shape {tuple(y.shape)} and dtype {y.dtype}'}.")
        after = y[:, 1:]
        if self.mask is not None and self.mask.shape == y.shape:
            after = torch.where(self.mask[:, 1:].to(y.device), after, self.ignore_index)
        return torch.cat([after, torch.full_like(y[:, :1], self.ignore_index)], 1)

    def repeats_input(self) -> bool:
        """Are the token labels the ids that the model reads, at all tokens that have one?"""
        y, x = self.y, self.x
        if y is None or y.is_floating_point() or y.dim() != 2 or y.shape[1] < 2:
            return False
        names = [k for k in ("decoder_input_ids", "input_ids") if k in x] if isinstance(x, dict) else []
        inputs = [x[names[0]]] if names else [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, dict) else x)
        real = y != self.ignore_index
        if self.mask is not None and self.mask.shape == y.shape:
            real = real & self.mask.to(y.device)
        return any(t.shape == y.shape and not t.is_floating_point() and bool((t.to(y.device) == y)[real].all()) for t in inputs)

    def _check_labels(self, y: Tensor) -> None:
        if y.dim() == 0 or y.shape[0] != self.n:
            raise ProbeError(f"y has shape {tuple(y.shape)} but x has {self.n} examples: one label is needed for each.")
        if y.is_complex():
            raise ProbeError(f"y has dtype {y.dtype}; labels are class ids, token ids or real targets.")
        if not y.is_floating_point():
            real = y[y != self.ignore_index]
            if not len(real):
                raise ProbeError(f"every label is ignore_index ({self.ignore_index}), so there is nothing to align with.")
            if (real < 0).any():
                raise ProbeError(f"y contains {int(real.min())}: class ids start at 0 (and {self.ignore_index} means no label).")
            if len(real) > 1 and (real == real[0]).all():
                raise ProbeError(f"all labels are {int(real[0])}: with one class no measure can tell learning from its absence. "
                                 f"Draw a probe with several classes (Probe.from_loader(..., balanced=True)), or pass y=None "
                                 f"to leave out the measures that need labels.")

    @classmethod
    def from_loader(cls, loader: Iterable[Any], n: int = 256, balanced: bool = True, seed: int = 0,
                    **options: Any) -> Probe:
        """Draw ``n`` examples from a DataLoader, a Dataset or a Hugging Face dataset, without touching any random stream.

        Batches are (x, y) pairs or dicts with "labels" / "label"; ``balanced``: as many of each class as there are, out of
        the first 20 n examples; else the first n. A dataset is shuffled by ``seed``, a loader gives what it gives.
        """
        if n < 2:
            raise ProbeError(f"from_loader(n={n}): a probe needs at least two examples.")
        xs, ys, seen, loose = [], [], 0, False
        with undisturbed(loader, seed):
            for batch in batches(loader, seed):
                x, y = pair(batch)
                loose = loose or _is_loose(x)
                xs.append(_tensors(x, "x"))
                ys.append(None if y is None else _tensors(y, "y"))
                seen += count(xs[-1])
                if seen >= (20 * n if balanced else n):
                    break
        if not xs:
            raise ProbeError("the loader gave no batch: the probe would be empty.")
        x = _join(xs)
        y = None if any(t is None for t in ys) else torch.cat([t for t in ys if t is not None])
        if balanced and _is_classes(y):
            assert y is not None
            chosen = _balanced(y, n, seed, options.get("ignore_index", IGNORE_INDEX))
        else:
            chosen = torch.arange(min(n, seen))
        probe = cls(select(x, chosen), None if y is None else y[chosen], **options)
        object.__setattr__(probe, "_loose", loose)
        return probe

    def inputs(self, dtype: torch.dtype) -> Any:
        """x for a model of this dtype: numbers that came without one of torch's (numpy, lists) take the model's."""
        return _cast(self.x, dtype) if self._loose else self.x

    def kernel_rows(self) -> Tensor:
        """Which examples enter kernels: all of a small probe, else class-balanced, always the same."""
        if self.kernel is None or self.n <= self.kernel:
            return torch.arange(self.n)
        if self.y is None or not _is_classes(self.y):
            return torch.arange(self.kernel)
        return _balanced(self.y, self.kernel, None, self.ignore_index).sort().values

    def holds_ids(self, shape: torch.Size) -> bool:
        """Are the labels class or token ids, for outputs of ``shape`` [n, ...]? Else they are targets."""
        y = self.y
        return y is not None and not y.is_floating_point() and shape[1:].numel() > 1 \
            and (y.shape[1:] != shape[1:] or y.dim() < len(shape))

    def targets(self, shape: torch.Size) -> tuple[Tensor | None, Tensor | None]:
        """Labels as targets "n k" for outputs of ``shape`` [n, ...], and "n k" False at outputs that do not count."""
        rest = shape[1:]
        k, keep = rest.numel(), None
        if self.mask is not None:
            if not rest or rest[0] != self.mask.shape[1]:
                raise ProbeError(f"mask has {self.mask.shape[1]} positions, but the model's output has shape {tuple(shape)}: "
                                 f"its second axis should be the positions. Pick it with output=....")
            keep = self.mask.reshape(*self.mask.shape, *[1] * (len(rest) - 1)).expand(self.n, *rest).reshape(self.n, k)
        y = self.y
        if y is None:
            return None, keep
        if self.holds_ids(shape):
            if 8 * self.n * k > WRITTEN:
                return self._made_when_asked(y, rest, keep)
            y, labelled = self._one_hot(y, rest)
            if labelled is not None:
                keep = labelled if keep is None else keep & labelled
        if y.numel() != self.n * k:
            raise ProbeError(f"y has shape {tuple(y.shape)} but the model's output has shape {tuple(shape)} for "
                             f"{self.n} examples. Give class ids [n], targets of the output's shape, or token ids [n, T].")
        y = y.reshape(self.n, k).double()
        if not torch.isfinite(y).all():
            raise ProbeError("y contains NaN or Inf.")
        return (y if keep is None else y * keep), keep

    def _made_when_asked(self, y: Tensor, rest: torch.Size, keep: Tensor | None) -> tuple[Any, Tensor | None]:
        """The same of many outputs: the targets answer as a tensor does (OneHot)."""
        real = self._checked(y, rest).reshape(self.n, -1)
        if not bool(real.all()):
            labelled = real[..., None].expand(*real.shape, rest[-1]).reshape(self.n, -1)
            keep = labelled if keep is None else keep & labelled
        counted = real if keep is None else keep.view(*real.shape, -1)[..., 0]
        return OneHot(torch.where(real, y.reshape(self.n, -1), 0).long(), counted, rest[-1]), keep

    def _one_hot(self, y: Tensor, rest: torch.Size) -> tuple[Tensor, Tensor | None]:
        """Class ids [n] or token ids [n,T] -> one-hot of the outputs' shape, and where there is no label."""
        real = self._checked(y, rest)
        hot = torch.nn.functional.one_hot(torch.where(real, y, 0).long(), rest[-1]) * real[..., None]
        if real.all():
            return hot, None
        return hot, real[..., None].expand(hot.shape).reshape(self.n, -1)

    def _checked(self, y: Tensor, rest: torch.Size) -> Tensor:
        """Where there is a label."""
        classes = rest[-1]
        real = y != self.ignore_index
        if y.shape[1:] != rest[:-1]:
            raise ProbeError(f"y has shape {tuple(y.shape)} but the model's output has shape [n, {', '.join(map(str, rest))}]: "
                             f"labels of shape [n{''.join(f', {d}' for d in rest[:-1])}] are needed.")
        if (y[real] >= classes).any():
            raise ProbeError(f"y contains label {int(y[real].max())}, but the model has {classes} outputs (labels 0 to "
                             f"{classes - 1}). Is the last layer too small, or do labels start at 1?")
        return real


def _writable(a: np.ndarray) -> np.ndarray:
    """torch wants to be able to write; what pandas hands out may be read only."""
    return a if a.flags.writeable else a.copy()


def _labels(y: Any) -> Tensor:
    """Class ids as int64, whatever width they came in; targets as they are."""
    t = _tensors(y, "y")
    if not isinstance(t, Tensor):
        raise ProbeError(f"y is a {type(y).__name__} of several parts; one array of labels is needed.")
    return t if t.is_floating_point() or t.is_complex() else t.long()


def _tensors(x: Any, name: str) -> Any:
    """Tensors of whatever was given, not yet copied; NaN is not let in."""
    if isinstance(x, Mapping):
        return {k: _tensors(v, f"{name}[{k!r}]") for k, v in x.items()}
    if isinstance(x, (tuple, list)) and len(x) and isinstance(x[0], (Tensor, np.ndarray)):
        return tuple(_tensors(v, f"{name}[{i}]") for i, v in enumerate(x))
    try:
        t = x.detach() if isinstance(x, Tensor) else torch.as_tensor(_writable(np.asarray(x)))
    except (TypeError, ValueError) as error:
        raise ProbeError(f"{name} is a {type(x).__name__} that cannot be read as numbers ({error}).") from error
    if t.is_complex():
        raise ProbeError(f"{name} has complex dtype {t.dtype}. Gradients of complex inputs have no single definition; "
                         f"give real and imaginary parts as two channels.")
    if t.is_floating_point() and not torch.isfinite(t).all():
        bad = (~torch.isfinite(t)).reshape(t.shape[0] if t.dim() else 1, -1).any(1).nonzero().flatten().tolist()
        raise ProbeError(f"{name} contains NaN or Inf (examples {', '.join(map(str, bad[:5]))}{' ...' if len(bad) > 5 else ''}): "
                         f"every statistic would be NaN. Remove or repair these examples.")
    return t


def _examples(x: Any) -> int:
    tensors = [x] if isinstance(x, Tensor) else list(x.values() if isinstance(x, dict) else x)
    if not tensors:
        raise ProbeError(f"the probe is empty: x is an empty {type(x).__name__}.")
    sizes = {t.shape[0] if isinstance(t, Tensor) and t.dim() else -1 for t in tensors}
    if len(sizes) != 1 or -1 in sizes:
        raise ProbeError(f"the parts of x have different numbers of examples ({sorted(sizes)}); the first axis of each must be "
                         f"the examples.")
    return sizes.pop()


def _kind(x: Any) -> Any:
    """What inputs look like, whatever their number."""
    if isinstance(x, dict):
        return {k: _kind(v) for k, v in x.items()}
    return tuple(map(_kind, x)) if isinstance(x, tuple) else [*x.shape[1:]]


def _is_classes(y: Tensor | None) -> bool:
    return y is not None and y.dim() == 1 and not y.is_floating_point()


def inputs_of(loader: Iterable[Any]) -> Iterator[Any]:
    """Of every batch of a DataLoader, without touching any random stream."""
    with undisturbed(loader, 0):
        for batch in batches(loader, 0):
            yield pair(batch)[0]


def _balanced(y: Tensor, n: int, seed: int | None, ignore: int) -> Tensor:
    """``n`` rows, as many of each class as there are: round robin over classes, in order or in an order drawn by seed.
    Rows without a label come last."""
    y = y.cpu()
    order = torch.arange(len(y)) if seed is None else torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    classes = [order[y[order] == c] for c in y.unique() if c != ignore]
    longest = max(map(len, classes), default=0)
    rounds = [rows[i] for i in range(longest) for rows in classes if i < len(rows)]
    return torch.stack([*rounds, *order[y[order] == ignore]][:n])


def _cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor):
        return x.to(dtype) if x.is_floating_point() else x
    return {k: _cast(v, dtype) for k, v in x.items()} if isinstance(x, dict) else tuple(_cast(v, dtype) for v in x)


def _is_loose(x: Any) -> bool:
    """Did the numbers come as numpy or lists, in whatever precision those have?"""
    if isinstance(x, Mapping):
        return any(_is_loose(v) for v in x.values())
    if isinstance(x, (tuple, list)) and len(x) and isinstance(x[0], (Tensor, np.ndarray)):
        return any(_is_loose(v) for v in x)
    return not isinstance(x, Tensor)


def _join(xs: list[Any]) -> Any:
    if isinstance(xs[0], dict):
        return {k: torch.cat([x[k] for x in xs]) for k in xs[0]}
    if isinstance(xs[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*xs, strict=True))
    return torch.cat(xs)


# ----------------------------------------------------------------------------------------------------------- objective
# What a network was trained on: the data loss L of a probe, and its gradient in the outputs.
#
#     Probe(x, y)                                                 # ids: cross-entropy; targets: squared error; as torch has them
#     Probe(x, y, loss=nn.MSELoss(), weight_decay=1e-4)           # class ids are then one-hot targets
#     Probe(x, y, loss=lambda f, y: (f - y).square().sum(1))      # a mean over examples, or one number for each
#
# The loss is called as loss(f, y) with all examples of the probe at once, so that nothing depends on chunks. ``weight_decay`` is
# that of the objective L + weight_decay/2 |theta|^2, whose gradient ``torch.optim.SGD(weight_decay=)`` follows.

# losses that compare each output with a target of its own
ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss)
ELEMENTWISE_FUNCTIONS = (F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits,
                         F.binary_cross_entropy)


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss and the labels it is asked with."""

    loss: Callable[..., Any] | None
    y: Tensor | None  # as the probe has them
    Y: Any  # targets "n k", one-hot for class ids (of many outputs a OneHot), or None
    ids: Tensor | None  # class or token ids, IGNORE_INDEX where there is none
    counted: Tensor | None  # "n k", False at outputs that do not count

    @classmethod
    def of(cls, probe: Probe, shape: torch.Size, Y: Tensor | None, counted: Tensor | None) -> Objective | None:
        """That of a probe whose outputs have ``shape`` [n, ...]; None if it has neither labels nor a loss."""
        if probe.loss is None and probe.y is None:
            return None
        ids = None
        if probe.y is not None and probe.holds_ids(shape):
            ids = torch.where(probe.y == probe.ignore_index, IGNORE_INDEX, probe.y)
            if counted is not None:
                ids = torch.where(counted.reshape(*shape)[..., 0].to(ids.device), ids, IGNORE_INDEX)
        return cls(probe.loss, probe.y, Y, ids, counted)

    def of_rows(self, keep: Tensor) -> Objective:
        """The same of some examples."""
        labels = (self.y, self.Y, self.ids, self.counted)
        parts: list[Any] = [None if t is None else t.take(keep.to(t.device)) if isinstance(t, OneHot) else
                            t[keep.to(t.device)] for t in labels]
        return Objective(self.loss, *parts)

    @property
    def classes(self) -> Tensor | None:
        """Class or token ids, negative where there is none: as given, or of targets of which one is 1 and the others 0."""
        if self.ids is not None or self.Y is None or self.Y.shape[1] < 2:
            return self.ids
        hot = bool(((self.Y == 0) | (self.Y == 1)).all()) and bool((self.Y.sum(1) == 1).all()) and self.counted is None
        return self.Y.argmax(1) if hot else None

    @property
    def assumed(self) -> bool:
        """Is the loss one that these targets need not be trained with? Those of 0 and 1 and probabilities are mostly trained with
        a cross-entropy."""
        if self.loss is not None or self.ids is not None or self.Y is None:
            return False
        Y = self.Y if self.counted is None else self.Y[self.counted.to(self.Y.device)][:, None]
        sums = (Y >= 0).all() and ((Y.sum(1) - 1).abs() < 1e-4).all()
        return bool(((Y == 0) | (Y == 1)).all() or (sums and Y.shape[1] > 1))

    @property
    def labels(self) -> Labels | None:
        """What guessing would get right on the classes; None where the labels are none."""
        ids = self.classes
        if ids is None or self.Y is None:
            return None
        real, classes = ids[ids >= 0], self.Y.numel() // ids.numel()
        if not len(real) or classes < 2:
            return None
        shares = real.bincount().double() / len(real)
        entropy = -torch.special.xlogy(shares, shares).sum().item() if self._plain_cross_entropy else 0.0
        return Labels(len(real), classes, shares.max().item(), entropy or None)  # of one class there is nothing to guess

    @property
    def _plain_cross_entropy(self) -> bool:
        """Of class or token ids, every label with the same weight."""
        own = self.loss
        plain = own is None or own is F.cross_entropy or (isinstance(own, nn.CrossEntropyLoss) and own.weight is None
                                                          and not own.label_smoothing)
        return plain and self.ids is not None

    def gradient(self, f: Tensor) -> Float[Tensor, "n k"]:
        """n dL/df of outputs f [n, ...]."""
        f = f.detach().to(torch.promote_types(f.dtype, torch.float32)).requires_grad_()
        L = self.mean(f)
        (d,) = torch.autograd.grad(L, f)
        if not torch.isfinite(d).all():
            raise ProbeError(f"the gradient of {self} in the outputs is NaN or Inf, and so would be every weight's. Give a loss "
                             f"that is differentiable where the model is.")
        V = len(f) * d.reshape(len(f), -1)
        if self.counted is not None and bool(V[~self.counted.to(V.device)].any()):
            raise ProbeError(f"{self} depends on outputs that do not count (masked positions, or labels that are ignore_index). "
                             f"Leave loss= out for cross-entropy or squared error of those that do, or give a loss that leaves "
                             f"the others out; it is called with all {len(f)} examples at once.")
        self._check_mean(f.detach(), L.item())
        return V

    def mean(self, f: Tensor) -> Float[Tensor, ""]:
        """L: what the loss returns, or the mean of it where it returns one number for each example."""
        try:
            found = self._default(f) if self.loss is None else self._own(f, self.loss)
        except Exception as why:
            raise ProbeError(f"{self} failed on outputs of shape {tuple(f.shape)} and labels of shape "
                             f"{None if self.y is None else tuple(self.y.shape)} ({type(why).__name__}: {why}). It is called as "
                             f"loss(f, y) with all examples of the probe, f as the model (or output=) returns it.") from why
        if not isinstance(found, Tensor) or not found.is_floating_point() or (found.dim() and found.numel() != len(f)):
            seen = f"numbers of shape {tuple(found.shape)}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
            raise ProbeError(f"{self} returned {seen} for {len(f)} examples. Their mean is needed, or one number for each.")
        if not torch.isfinite(found).all():
            raise ProbeError(f"{self} is NaN or Inf on the probe, and so would be every number that is made of it. Has the run "
                             f"diverged, or do the labels not suit the loss?")
        if not found.requires_grad:
            raise ProbeError(f"{self} does not depend on the outputs in a way that autograd can follow: it is constant, or was "
                             f"detached.")
        return found.mean()

    def _default(self, f: Tensor) -> Tensor:
        """Cross-entropy of class or token ids, squared error of targets: means over all that count, as torch's are."""
        if self.ids is not None:
            return F.cross_entropy(_last(f), self.ids.reshape(-1).to(f.device), ignore_index=IGNORE_INDEX)
        assert self.Y is not None
        squares = (f.reshape(len(f), -1) - self.Y.to(f)).square()
        return squares.mean() if self.counted is None else squares[self.counted.to(f.device)].mean()

    def _own(self, f: Tensor, loss: Callable[..., Any]) -> Any:
        """The user's. torch's own losses get labels in the shape that they need, any other those of the probe."""
        if self.Y is not None and (isinstance(loss, ELEMENTWISE) or loss in ELEMENTWISE_FUNCTIONS):
            return loss(f, self.Y.reshape(f.shape).to(f))
        if self.Y is not None and (isinstance(loss, nn.CrossEntropyLoss) or loss is F.cross_entropy):
            if self.ids is None:
                return loss(_last(f), _last(self.Y.reshape(f.shape)).to(f))
            ignored = getattr(loss, "ignore_index", IGNORE_INDEX)
            return loss(_last(f), torch.where(self.ids == IGNORE_INDEX, ignored, self.ids).reshape(-1).to(f.device))
        y = self.y
        return loss(f, None if y is None else y.to(f) if y.is_floating_point() else y.to(f.device))

    def _check_mean(self, f: Tensor, L: float) -> None:
        """A sum over examples doubles when every example is there twice. A loss that knows how many there are is trusted."""
        if self.loss is None or not L:
            return
        labels = (self.y, self.Y, self.ids, self.counted)
        again = torch.arange(len(f)).repeat(2)
        twice = Objective(self.loss, *(None if t is None else t[again] for t in labels))
        try:
            doubled = twice.mean(torch.cat([f, f]).requires_grad_()).item()
        except ProbeError:
            return
        if abs(doubled - 2 * L) <= 1e-5 * abs(L):
            raise ProbeError(f"{self} is a sum over examples: it doubles when each is given twice. A mean is needed "
                             f"(reduction='mean'), because a probe seldom has as many examples as were trained on; divide the "
                             f"loss and weight_decay by the number of examples.")

    def __str__(self) -> str:
        name = getattr(self.loss, "__name__", type(self.loss).__name__)
        return "the loss of the probe" if self.loss is None else f"Probe(loss={name})"


def _last(t: Tensor) -> Tensor:
    """Classes are the last axis here, and the second for torch."""
    return t.reshape(-1, t.shape[-1])


# --------------------------------------------------------------------------------------------------------------- shift
# Are token labels beside the outputs that predict them? Hugging Face's language models take ``labels=input_ids`` and move them
# by one themselves; a probe's labels are compared with the outputs as they are. Labels that equal the input ids are therefore
# looked at: the model's own loss of them says what it takes them for.

def aligned(network: Network, x: Inputs, probe: Probe, shape: torch.Size) -> tuple[Probe, str]:
    """The probe with its labels beside the outputs of ``shape`` [n, ...] that predict them, and a note if they were moved there;
    ``x``: its first examples."""
    if probe.shift is not None or not probe.holds_ids(shape) or not probe.repeats_input():
        return probe, ""
    kind, moves = type(network.model).__name__, _moves(network, x, probe)
    if moves is None:
        raise ProbeError(f"the labels y equal the input ids, and what a {kind} takes them for cannot be told: it has no labels= "
                         f"with a loss of its own that could be asked. As they are, each output would be compared with the token "
                         f"that it has just read. Say Probe(..., shift=True) for a language model (labels=input_ids, as Hugging "
                         f"Face takes them: each belongs to the output before it), or shift=False where the token itself is the "
                         f"label (an autoencoder, a masked language model).")
    if not moves:
        return probe, ""
    return probe.shifted(), (f"the labels equal the input ids, which a {kind} moves by one in its own loss: so they are here, "
                             f"each beside the output before it (Probe(shift=True) says so, shift=False leaves them as they are)")


def _moves(network: Network, x: Inputs, probe: Probe) -> bool | None:
    """Does the model's own loss compare a label with the output before it, or with the output at its place? None: it has no loss
    that could be asked."""
    assert probe.y is not None
    f = network.run(x, record=False).f.detach()
    y = torch.where(probe.y == probe.ignore_index, IGNORE_INDEX, probe.y)[:len(f)].to(f.device)
    if f.shape[:2] != y.shape or y.shape[1] < 2:
        return None
    first = y.clone()
    first[:, 0] = (first[:, 0].clamp(min=0) + 1) % f.shape[-1]  # other labels, of the first token alone
    last = y.clone()
    last[:, -1] = (last[:, -1].clamp(min=0) + 1) % f.shape[-1]
    losses = [_own_loss(network, x, labels) for labels in (y, first, last)]
    if any(loss is None for loss in losses) or losses[2] == losses[0]:  # a loss that does not care for the last label
        return None
    return losses[1] == losses[0]  # no output comes before the first token: a loss that moves labels leaves its label out


def _own_loss(network: Network, x: Inputs, y: Tensor) -> float | None:
    """What the model returns as its loss for ``labels=y``; None if it takes none."""
    accepted = inspect.signature(network.model.forward).parameters
    if "labels" not in accepted:
        return None
    inputs = x if isinstance(x, dict) else dict(zip(accepted, x if isinstance(x, tuple) else (x,), strict=False))
    try:
        return forward(network.model, {**inputs, "labels": y}, network.state, output=_loss, record=False).f.item()
    except Exception:  # it may fail in any way on what it was not asked before
        return None


def _loss(returned: Any) -> Tensor:
    return returned["loss"] if isinstance(returned, Mapping) else returned[0]
