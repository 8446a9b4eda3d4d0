"""The fixed examples on which a model is measured: ``Probe``."""

from __future__ import annotations

import contextlib
import copy
import functools
import html
import inspect
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from richter.core import Labels, ProbeError
from richter.core.arrays import writable
from richter.instrument.capture import Inputs, forward
from richter.instrument.stream import count, select
from richter.instrument.survey import Network

# ------------------------------------------------------------------------------------------------------------- targets
# Targets of class or token ids whose one-hot matrix would be too large: its rows are made when they are asked for.

WRITTEN = 2 ** 26  # bytes: smaller one-hot targets are plain tensors


class OneHot:
    """One-hot targets "n k" of class or token ids, formed when needed. ``Y[rows]`` is a tensor in double precision; any other
    tensor method forms the whole matrix."""

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
        """Number of entries of the one-hot matrix."""
        return self.shape.numel()

    @property
    def device(self) -> torch.device:
        """Device of the class ids."""
        return self.ids.device

    def counts(self, rows: Any, groups: int) -> tuple[Int[Tensor, " m"], Float[Tensor, "m g"]]:
        """Outputs that are the label of some of these examples, and of how many examples in each group."""
        ids, real = self.ids[rows].cpu(), self.real[rows].cpu()
        outputs = (torch.arange(ids.shape[1]) * self.classes + ids)[real]
        group = (torch.arange(len(ids)) % groups)[:, None].expand_as(ids)[real]
        labelled, place = torch.unique(outputs, return_inverse=True)
        labels = torch.zeros(len(labelled), groups, dtype=torch.float64)
        return labelled, labels.index_put_((place, group), torch.ones((), dtype=torch.float64), accumulate=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("ids", "real", "classes", "shape"):  # while it is copied it has none of them yet
            raise AttributeError(name)
        return getattr(self[:], name)


def labelled(Y: Tensor | OneHot, rows: Tensor) -> Bool[Tensor, " k"]:
    """Mask of the outputs that have a target other than 0 in some of these rows."""
    if not isinstance(Y, OneHot):
        return (Y[rows] != 0).any(0)
    return torch.zeros(Y.shape[1], dtype=torch.bool).index_fill_(0, Y.counts(rows, 1)[0], True)


def counts(Y: Tensor | OneHot, rows: Tensor, groups: int) -> tuple[Int[Tensor, " m"], Float[Tensor, "m g"]] | None:
    """Outputs that are the label of some of these rows, and of how many rows in each group; None for targets that are not
    one-hot."""
    if isinstance(Y, OneHot):
        return Y.counts(rows, groups)
    y = Y[rows].cpu().double()
    if not bool(((y == 0) | (y == 1)).all()):
        return None
    outputs = y.any(0).nonzero().flatten()
    return outputs, torch.stack([y[g::groups, outputs].sum(0) for g in range(groups)], 1)


def columns(Y: Any, rows: Int[Tensor, " n"], outputs: Int[Tensor, " v"]) -> Float[Tensor, "n v"]:
    """Targets of some outputs in some rows, made row by row; ones where there are no labels."""
    if Y is None:
        return torch.ones(len(rows), len(outputs), dtype=torch.float64)
    return torch.cat([(row := Y[rows[i:i + 1]])[:, outputs.to(row.device)] for i in range(len(rows))])


# -------------------------------------------------------------------------------------------------------------- inputs
# Inputs are an array, or a tuple or dict of arrays, examples first.

def _each(x: Any, change: Callable[[Any, str], Any], name: str = "x") -> Any:
    """Inputs of the same form, each array replaced by ``change(array, name)``."""
    if isinstance(x, Mapping):
        return {k: _each(v, change, f"{name}[{k!r}]") for k, v in x.items()}
    if _is_tuple(x):
        return tuple(_each(v, change, f"{name}[{i}]") for i, v in enumerate(x))
    return change(x, name)


def _joined(rows: Sequence[Any], join: Callable[[list[Any]], Any]) -> Any:
    """Join several inputs of one form: ``join`` merges the arrays at the same place."""
    if isinstance(rows[0], Mapping):
        return {k: _joined([row[k] for row in rows], join) for k in rows[0]}
    if isinstance(rows[0], tuple) or _is_tuple(rows[0]):
        return tuple(_joined(parts, join) for parts in zip(*rows, strict=True))
    return join(list(rows))


def _is_tuple(x: Any) -> bool:
    """Several arrays, not one that is written as nested lists."""
    return isinstance(x, (tuple, list)) and len(x) > 0 and isinstance(x[0], (Tensor, np.ndarray))


def _parts(x: Any) -> list[Any]:
    """Tensors of an input, which may be a mapping, a tuple or one tensor."""
    return list(x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else [x])


def _is_loose(x: Any) -> bool:
    """Did the numbers come as numpy or lists, in whatever precision those have?"""
    loose: list[bool] = []
    _each(x, lambda t, _: loose.append(not isinstance(t, Tensor)))
    return any(loose)


def _tensor(x: Any, name: str) -> Tensor:
    """A tensor of whatever was given, not yet copied; NaN is not let in."""
    try:
        t = x.detach() if isinstance(x, Tensor) else torch.as_tensor(writable(np.asarray(x)))
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


def _labels(y: Any) -> Tensor:
    """Class ids as int64; other targets unchanged."""
    t = _each(y, _tensor, "y")
    if not isinstance(t, Tensor):
        raise ProbeError(f"y is a {type(y).__name__} of several parts; one array of labels is needed.")
    return t.clone() if t.is_floating_point() else t.long().clone()


def _examples(x: Any) -> int:
    """Number of examples; raise an error if parts of the input disagree."""
    if not (tensors := _parts(x)):
        raise ProbeError(f"the probe is empty: x is an empty {type(x).__name__}.")
    sizes = {t.shape[0] if isinstance(t, Tensor) and t.dim() else -1 for t in tensors}
    if len(sizes) != 1 or -1 in sizes:
        raise ProbeError(f"the parts of x have different numbers of examples ({sorted(sizes)}); the first axis of each must be "
                         f"the examples.")
    return sizes.pop()


def _is_classes(y: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether labels are class ids."""
    return y is not None and y.dim() == 1 and not y.is_floating_point()


def _balanced(y: Tensor, n: int, seed: int | None, ignore: int) -> Tensor:
    """``n`` rows, as many of each class as there are: round robin over classes, in order or in an order drawn by seed.
    Rows without a label come last."""
    y = y.cpu()
    order = torch.arange(len(y)) if seed is None else torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    classes = [order[y[order] == c] for c in y.unique() if c != ignore]
    longest = max(map(len, classes), default=0)
    rounds = [rows[i] for i in range(longest) for rows in classes if i < len(rows)]
    return torch.stack([*rounds, *order[y[order] == ignore]][:n])


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
    """Iterate batches: of a DataLoader, or any iterable of batches, as they come; of a dataset shuffled by a seed of its own."""
    indexed = hasattr(loader, "__getitem__") and hasattr(loader, "__len__")
    in_batches = isinstance(loader, (list, tuple)) and len(loader) and _is_batch(loader[0])
    if isinstance(loader, torch.utils.data.DataLoader) or not indexed or not len(loader) or in_batches:
        return loader
    draw = torch.Generator().manual_seed(seed)
    return torch.utils.data.DataLoader(loader, batch_size=64, shuffle=True, generator=draw,
                                       collate_fn=functools.partial(_joined, join=_side_by_side))


def _is_batch(item: Any) -> bool:
    """Is this a batch, or one example? A batch has inputs of two axes or more, and as many labels as inputs."""
    if isinstance(item, (Tensor, np.ndarray)):
        return False
    x, y = pair(item)
    arrays = _parts(x)
    if not arrays or not all(isinstance(t, (Tensor, np.ndarray)) and t.ndim >= 2 for t in arrays):
        return False
    return y is None or (isinstance(y, (Tensor, np.ndarray)) and y.ndim >= 1 and len(y) == len(arrays[0]))


def _side_by_side(arrays: list[Any]) -> Any:
    """Examples as a batch; lists of numbers (as a plain Hugging Face dataset has them) as arrays."""
    return torch.stack(arrays) if isinstance(arrays[0], Tensor) else np.stack([np.asarray(a) for a in arrays])


def pair(batch: Any) -> tuple[Any, Any]:
    """(x, y) of one batch: a pair, or a dict with its labels under a usual name."""
    if isinstance(batch, Mapping):
        batch = {k: _stacked(v) for k, v in batch.items()}
        label = next((k for k in ("labels", "label", "y", "target", "targets") if k in batch), None)
        rest = {k: v for k, v in batch.items() if k != label}
        if len(rest) == 1 and "input_ids" not in rest:
            rest = next(iter(rest.values()))
        return rest, None if label is None else batch[label]
    if isinstance(batch, (tuple, list)):
        *parts, y = batch if len(batch) > 1 else (batch[0], None)
        return tuple(parts) if len(parts) > 1 else parts[0], y
    return batch, None


def _stacked(v: Any) -> Any:
    """torch's default collation turns n lists of d numbers into d tensors of n: put them together again."""
    columns = isinstance(v, (list, tuple)) and len(v) and all(isinstance(t, Tensor) and t.dim() == 1 for t in v)
    return torch.stack(list(v), 1) if columns else v


# --------------------------------------------------------------------------------------------------------------- probe

IGNORE_INDEX = -100  # as in torch.nn.functional.cross_entropy


@dataclass(frozen=True, eq=False, repr=False)
class Probe:
    """A fixed set of examples, the same at every measurement.

    >>> Probe(x, y)                                   # tensors or arrays; y: class ids [n], targets [n,k]
    >>> Probe({"input_ids": ids}, tokens, mask=real)  # y: token ids [n,T], -100 where there is no label
    >>> Probe.from_loader(loader, n=256)              # balanced over classes, drawn with a seed of its own

    ``chunk`` examples go through the model at a time; ``kernel_examples`` class-balanced examples enter tangent kernels (None:
    all); ``mask`` [n,T] is True at real tokens: masked positions enter no sum. ``y=None``: no measure that needs labels.
    ``loss(f, y)`` and ``weight_decay`` are what the network was trained with, for measures of features at convergence (None:
    cross-entropy for ids, squared error for targets). ``held_out=(x2, y2)``: examples of the same kind on which features are
    evaluated that were fitted on the others (a Probe, if they need a mask of their own).

    Token labels stand beside the outputs that predict them: of a language model ``y[:, t]`` is ``ids[:, t + 1]``.
    ``shift=True``: they are given as Hugging Face's ``labels=input_ids`` and are moved there (``y`` is then what was moved, and
    ``shift`` False). ``shift=False``: they are where they belong. ``shift=None``: the same, unless they equal the input ids. Then
    a model that moves ``labels`` in its own loss has them moved, and the snapshot says so; one that compares them in place (a
    masked language model) has them as they are; where the model has no loss to be asked, an error asks you.

    Tensors are copied: a probe stays the same whatever becomes of yours.
    """

    x: Any
    y: Tensor | None
    chunk: int = 256
    kernel_examples: int | None = 64
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
        put("x", _each(self.x, lambda t, name: _tensor(t, name).clone()))
        put("y", None if self.y is None else _labels(self.y))
        put("mask", None if self.mask is None else _tensor(self.mask, "mask").bool().clone())
        put("n", _examples(self.x))
        self._check_options()
        if self.n == 0:
            raise ProbeError("the probe is empty: x holds no example. Give a few hundred inputs the model was not built for "
                             "memorising, e.g. Probe(x[:256], y[:256]).")
        if self.n == 1:
            raise ProbeError("the probe has one example; averages and kernels over examples need at least two "
                             "(a few hundred give small error bars).")
        if self.mask is not None and (self.mask.dim() != 2 or self.mask.shape[0] != self.n):
            raise ProbeError(f"mask has shape {tuple(self.mask.shape)} for {self.n} examples; [n, T] is needed, True at real "
                             f"tokens.")
        if self.mask is not None and not self.mask.any():
            raise ProbeError("mask is False everywhere, so no position is left to be measured.")
        shift = self.shift
        if shift:
            put("y", self._moved())
            put("shift", False)  # it has been done
        if self.y is not None:
            self._check_labels(self.y)
        if self.held_out is not None:
            put("held_out", self._aside(self.held_out, shift))

    def __repr__(self) -> str:
        return f"Probe({', '.join(self._words())})"

    def _repr_html_(self) -> str:
        """Summary for notebooks."""
        return f"<b>Probe</b>: {html.escape(', '.join(self._words()))}"

    def _words(self) -> list[str]:
        """Describe inputs, labels and parts."""
        shapes = list[str]()
        _each(self.x, lambda t, name: shapes.append(f"{name} {[*t.shape]} of {str(t.dtype).removeprefix('torch.')}"))
        labels = "no labels"
        if self.y is not None:
            ids = self.y[self.y != self.ignore_index] if _is_classes(self.y) else None
            labels = f"y {[*self.y.shape]}" if ids is None else f"{len(ids.unique())} classes"
        return [f"{self.n} examples", *shapes, labels, *(["a mask"] if self.mask is not None else []),
                *([f"{self.held_out.n} held out"] if self.held_out is not None else [])]

    def _check_options(self) -> None:
        """Raise an error for options that are not valid."""
        for name in ("chunk", "kernel_examples"):
            value = getattr(self, name)
            whole = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
            if not (value is None and name == "kernel_examples") and (not whole or value < 1):
                raise ProbeError(f"Probe({name}={value!r}): a positive whole number is needed.")
        if self.kernel_examples == 1:
            raise ProbeError("Probe(kernel_examples=1): a kernel needs at least two examples.")
        if self.loss is not None and not callable(self.loss):
            raise ProbeError(f"Probe(loss={self.loss!r}): a function loss(f, y) is needed, e.g. torch.nn.MSELoss().")
        decay = self.weight_decay
        if isinstance(decay, bool) or not isinstance(decay, (int, float, np.number)) or not 0 <= decay < math.inf:
            raise ProbeError(f"Probe(weight_decay={decay!r}): the objective is loss + weight_decay/2 |weights|^2, so a number "
                             f"that is not negative is needed, the one that the optimiser has.")
        if not (self.shift is None or isinstance(self.shift, bool)):
            raise ProbeError(f"Probe(shift={self.shift!r}): True (labels=input_ids, as Hugging Face takes them), False (each "
                             f"label beside the output that predicts it) or None.")

    def _check_labels(self, y: Tensor) -> None:
        """Raise an error for labels that do not fit the examples."""
        if y.dim() == 0 or y.shape[0] != self.n:
            raise ProbeError(f"y has shape {tuple(y.shape)} but x has {self.n} examples: one label is needed for each.")
        if y.is_floating_point():
            return
        real = y[y != self.ignore_index]
        if not len(real):
            raise ProbeError(f"every label is ignore_index ({self.ignore_index}), so there is nothing to align with.")
        if (real < 0).any():
            raise ProbeError(f"y contains {int(real.min())}: class ids start at 0 (and {self.ignore_index} means no label).")
        if len(real) > 1 and (real == real[0]).all():
            raise ProbeError(f"all labels are {int(real[0])}: with one class no measure can tell learning from its absence. "
                             f"Draw a probe with several classes (Probe.from_loader(..., balanced=True)), or pass y=None "
                             f"to leave out the measures that need labels.")

    def _aside(self, given: Any, shift: bool | None) -> Probe:
        """Probe of the held-out examples, with the same settings."""
        if not isinstance(given, Probe):
            if not isinstance(given, (tuple, list)) or len(given) != 2:
                raise ProbeError(f"Probe(held_out=...) is a {type(given).__name__}; give a pair (x2, y2) of examples like those "
                                 "of the probe.")
            x, y = given
            given = Probe(x, y, chunk=self.chunk, kernel_examples=self.kernel_examples,
                          ignore_index=self.ignore_index, loss=self.loss, weight_decay=self.weight_decay, shift=shift)
        here, there = (_each(p.x, lambda t, _: [*t.shape[1:]]) for p in (self, given))
        unlabelled = (given.y is None) != (self.y is None)
        if here != there or unlabelled:
            raise ProbeError(f"Probe(held_out=...) has other inputs or labels than the probe: inputs {there} beside "
                             f"{here}{', and labels in one of them only' if unlabelled else ''}. Both go through the same "
                             "model.")
        return given

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
                xs.append(_each(x, _tensor))
                ys.append(None if y is None else _each(y, _tensor, "y"))
                seen += count(xs[-1])
                if seen >= (20 * n if balanced else n):
                    break
        if not xs:
            raise ProbeError("the loader gave no batch: the probe would be empty.")
        x, labels = _joined(xs, torch.cat), [y for y in ys if y is not None]
        y = torch.cat(labels) if len(labels) == len(ys) else None
        if balanced and _is_classes(y):
            chosen = _balanced(y, n, seed, options.get("ignore_index", IGNORE_INDEX))
        else:
            chosen = torch.arange(min(n, seen))
        probe = cls(select(x, chosen), None if y is None else y[chosen], **options)
        object.__setattr__(probe, "_loose", loose)
        return probe

    def inputs(self, dtype: torch.dtype) -> Any:
        """x for a model of this dtype: numbers that came without one of torch's (numpy, lists) take the model's."""
        return _each(self.x, lambda t, _: t.to(dtype) if t.is_floating_point() else t) if self._loose else self.x

    def part(self, n: int, kernel_examples: int) -> Probe:
        """Copy with ``n`` class-balanced examples, of which ``kernel_examples`` enter kernels, and as many held-out ones."""
        if n >= self.n:
            rows = torch.arange(self.n)
        else:
            rows = _balanced(self.y, n, None, self.ignore_index).sort().values if _is_classes(self.y) else torch.arange(n)
        other = copy.copy(self)
        held_out = None if self.held_out is None else self.held_out.part(n, kernel_examples)
        for name, value in {"x": select(self.x, rows), "y": None if self.y is None else self.y[rows],
                            "mask": None if self.mask is None else self.mask[rows], "n": len(rows), "held_out": held_out,
                            "kernel_examples": kernel_examples}.items():
            object.__setattr__(other, name, value)
        return other

    def kernel_rows(self) -> Tensor:
        """Numbers of the kernel examples: all of a small probe, otherwise class-balanced and fixed."""
        if self.kernel_examples is None or self.n <= self.kernel_examples:
            return torch.arange(self.n)
        if not _is_classes(self.y):
            return torch.arange(self.kernel_examples)
        return _balanced(self.y, self.kernel_examples, None, self.ignore_index).sort().values

    # ------------------------------------------------------------------------------------------------ labels, targets

    def holds_ids(self, shape: torch.Size) -> bool:
        """Are the labels class or token ids, for outputs of ``shape`` [n, ...]? Else they are targets."""
        y = self.y
        return y is not None and not y.is_floating_point() and shape[1:].numel() > 1 and y.shape[1:] != shape[1:]

    def targets(self, shape: torch.Size) -> tuple[Any, Tensor | None]:
        """Labels as targets "n k" for outputs of ``shape`` [n, ...] (a OneHot where they are large), and "n k" False at outputs
        that do not count."""
        rest, y, keep = shape[1:], self.y, None
        k = rest.numel()
        if self.mask is not None:
            if not rest or rest[0] != self.mask.shape[1]:
                raise ProbeError(f"mask has {self.mask.shape[1]} positions, but the model's output has shape {tuple(shape)}: "
                                 f"its second axis should be the positions. Pick it with output=....")
            keep = self.mask.reshape(*self.mask.shape, *[1] * (len(rest) - 1)).expand(self.n, *rest).reshape(self.n, k)
        if y is None:
            return None, keep
        if self.holds_ids(shape):
            real = self._real(y, rest).reshape(self.n, -1)
            if not real.all():
                labelled = real[..., None].expand(*real.shape, rest[-1]).reshape(self.n, k)
                keep = labelled if keep is None else keep & labelled
            counted = real if keep is None else keep.view(*real.shape, rest[-1])[..., 0]
            hot = OneHot(torch.where(real, y.reshape(self.n, -1), 0).long(), counted, rest[-1])
            return hot if 8 * self.n * k > WRITTEN else hot[:], keep
        if y.numel() != self.n * k:
            raise ProbeError(f"y has shape {tuple(y.shape)} but the model's output has shape {tuple(shape)} for "
                             f"{self.n} examples. Give class ids [n], targets of the output's shape, or token ids [n, T].")
        y = y.reshape(self.n, k).double()
        return (y if keep is None else y * keep), keep

    def _real(self, y: Tensor, rest: torch.Size) -> Tensor:
        """Mask of the labels that exist, for outputs [n, *rest]."""
        real = y != self.ignore_index
        if y.shape[1:] != rest[:-1]:
            raise ProbeError(f"y has shape {tuple(y.shape)} but the model's output has shape [n, {', '.join(map(str, rest))}]: "
                             f"labels of shape [n{''.join(f', {d}' for d in rest[:-1])}] are needed.")
        if (y[real] >= rest[-1]).any():
            raise ProbeError(f"y contains label {int(y[real].max())}, but the model has {rest[-1]} outputs (labels 0 to "
                             f"{rest[-1] - 1}). Is the last layer too small, or do labels start at 1?")
        return real

    @property
    def _tokens(self) -> Tensor | None:
        """The labels, if they are token ids [n, T] that can be moved by one."""
        y = self.y
        return None if y is None or y.is_floating_point() or y.dim() != 2 or y.shape[1] < 2 else y

    def _real_tokens(self, y: Tensor) -> Tensor | None:
        """Mask of the tokens that count, if the labels have its shape."""
        return self.mask.to(y.device) if self.mask is not None and self.mask.shape == y.shape else None

    def shifted(self) -> Probe:
        """Copy of the probe, each label beside the output before it."""
        other = copy.copy(self)
        object.__setattr__(other, "y", self._moved())
        object.__setattr__(other, "shift", False)
        return other

    def _moved(self) -> Tensor:
        """Labels moved by one token, y[:, t + 1] at t. The last token has no label, and neither has one before a masked token."""
        if (y := self._tokens) is None:
            seen = "is None" if self.y is None else f"has shape {tuple(self.y.shape)} and dtype {self.y.dtype}"
            raise ProbeError(f"Probe(shift=True) moves token ids [n, T] by one, T > 1; y {seen}.")
        real = self._real_tokens(y)
        after = y[:, 1:] if real is None else torch.where(real[:, 1:], y[:, 1:], self.ignore_index)
        return torch.cat([after, torch.full_like(y[:, :1], self.ignore_index)], 1)

    def repeats_input(self) -> bool:
        """Are the token labels the ids that the model reads, at all tokens that have one?"""
        if (y := self._tokens) is None:
            return False
        names = [k for k in ("decoder_input_ids", "input_ids") if k in self.x] if isinstance(self.x, dict) else []
        mask = self._real_tokens(y)
        real = y != self.ignore_index if mask is None else (y != self.ignore_index) & mask
        return any(t.shape == y.shape and not t.is_floating_point() and bool((t.to(y.device) == y)[real].all())
                   for t in _parts(self.x[names[0]] if names else self.x))


def inputs_of(loader: Iterable[Any]) -> Iterator[Any]:
    """The inputs of every batch of a DataLoader, without touching any random stream."""
    with undisturbed(loader, 0):
        for batch in batches(loader, 0):
            yield pair(batch)[0]


# ----------------------------------------------------------------------------------------------------------- objective
# What a network was trained on: the data loss L of a probe, and its gradient in the outputs.
#
#     Probe(x, y)                                                 # ids: cross-entropy; targets: squared error; as torch has them
#     Probe(x, y, loss=nn.MSELoss(), weight_decay=1e-4)           # class ids are then one-hot targets
#     Probe(x, y, loss=lambda f, y: (f - y).square().sum(1))      # a mean over examples, or one number for each
#
# The loss is called as loss(f, y) with all examples of the probe at once, so that nothing depends on chunks. ``weight_decay`` is
# that of the objective L + weight_decay/2 |theta|^2, whose gradient ``torch.optim.SGD(weight_decay=)`` follows.

CROSS_ENTROPY = (nn.CrossEntropyLoss, F.cross_entropy)
ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCEWithLogitsLoss, nn.BCELoss, F.mse_loss, F.l1_loss,
               F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits, F.binary_cross_entropy)


def _is_one(loss: Any, kinds: Sequence[Any]) -> bool:
    """Is a loss one of these modules and functions of torch?"""
    return any(loss is kind or (isinstance(kind, type) and isinstance(loss, kind)) for kind in kinds)


@dataclass(frozen=True, eq=False)
class Objective:
    """A loss and the labels it is called with; None where there are none."""

    loss: Callable[..., Any] | None
    class_count: int  # that the outputs tell apart
    y: Tensor | None  # as the probe has them
    ids: Tensor | None  # class or token ids, IGNORE_INDEX where there is none
    targets: Tensor | None  # "n k", if the labels are no ids
    counted: Tensor | None  # "n k", False at outputs that do not count

    @classmethod
    def of(cls, probe: Probe, shape: torch.Size, Y: Any, counted: Tensor | None) -> Objective | None:
        """The objective of a probe whose outputs have ``shape`` [n, ...]; None if it has neither labels nor a loss."""
        if probe.loss is None and probe.y is None:
            return None
        if probe.y is None or not probe.holds_ids(shape):
            return cls(probe.loss, shape[1:].numel(), probe.y, None, Y, counted)
        ids = torch.where(probe.y == probe.ignore_index, IGNORE_INDEX, probe.y)
        if counted is not None:
            ids = torch.where(counted.reshape(*shape)[..., 0].to(ids.device), ids, IGNORE_INDEX)
        return cls(probe.loss, shape[-1], probe.y, ids, None, counted)

    def of_rows(self, keep: Tensor) -> Objective:
        """Objective of some of the examples."""
        labels = (self.y, self.ids, self.targets, self.counted)
        return Objective(self.loss, self.class_count, *(None if t is None else t[keep.to(t.device)] for t in labels))

    @property
    def Y(self) -> Tensor | None:
        """Targets "n k", one-hot for class ids."""
        if self.ids is None:
            return self.targets
        return (F.one_hot(self.ids.clamp(min=0), self.class_count) * (self.ids >= 0)[..., None]).flatten(1)

    @property
    def classes(self) -> Tensor | None:
        """Class or token ids, negative where there is no label; also from one-hot targets."""
        Y = self.targets
        if Y is None or Y.shape[1] < 2:
            return self.ids
        hot = bool(((Y == 0) | (Y == 1)).all()) and bool((Y.sum(1) == 1).all()) and self.counted is None
        return Y.argmax(1) if hot else None

    @property
    def assumed(self) -> bool:
        """Is the loss one that these targets need not be trained with? Targets of 0 and 1 and probabilities are mostly trained
        with a cross-entropy."""
        if self.loss is not None or self.targets is None:
            return False
        Y = self.targets if self.counted is None else self.targets[self.counted.to(self.targets.device)][:, None]
        sums = (Y >= 0).all() and ((Y.sum(1) - 1).abs() < 1e-4).all()
        return bool(((Y == 0) | (Y == 1)).all() or (sums and Y.shape[1] > 1))

    @property
    def labels(self) -> Labels | None:
        """The class labels, and what guessing gets right; None where labels are no classes."""
        ids = self.classes
        if ids is None or not len(real := ids[ids >= 0]) or self.class_count < 2:
            return None
        shares = real.bincount().double() / len(real)
        # the entropy is the loss of the best guess if the loss is a cross-entropy of ids, every label with the same weight
        plain = self.ids is not None and (self.loss is None or (_is_one(self.loss, CROSS_ENTROPY) and getattr(
            self.loss, "weight", None) is None and not getattr(self.loss, "label_smoothing", 0)))
        entropy = -torch.special.xlogy(shares, shares).sum().item() if plain else 0.0
        return Labels(len(real), self.class_count, shares.max().item(), entropy or None)  # of one class there is nothing to guess

    def gradient(self, f: Tensor) -> Float[Tensor, "n k"]:
        """Gradient n dL/df of the mean loss with respect to outputs f [n, ...]."""
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
        if self.loss is not None:
            self._check_mean(f.detach(), L.item())
        return V

    def mean(self, f: Tensor, keep: Tensor | None = None) -> Float[Tensor, ""]:
        """Loss L of outputs f; the mean if the loss returns one number per example. ``keep``: which examples these outputs are of
        (None: all)."""
        if keep is not None:
            return self.of_rows(keep).mean(f)
        try:
            found = self._called(f)
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

    def _called(self, f: Tensor) -> Any:
        """Call the loss with the labels it needs: torch's own losses with ids or targets in the shape of the outputs, other
        losses with the probe's labels. Without a loss, average over all outputs that count."""
        loss, ids, Y = self.loss, self.ids, self.targets
        if loss is None and Y is not None:
            squares = (f.reshape(len(f), -1) - Y.to(f)).square()
            return squares.mean() if self.counted is None else squares[self.counted.to(f.device)].mean()
        if ids is not None and (loss is None or _is_one(loss, CROSS_ENTROPY)):
            ids = torch.where(ids == IGNORE_INDEX, getattr(loss, "ignore_index", IGNORE_INDEX), ids)
            return (loss or F.cross_entropy)(_last(f), ids.reshape(-1).to(f.device))
        assert loss is not None
        if Y is not None and _is_one(loss, CROSS_ENTROPY):
            return loss(_last(f), _last(Y.reshape(f.shape)).to(f))
        if _is_one(loss, ELEMENTWISE) and (Y := self.Y) is not None:
            return loss(f, Y.reshape(f.shape).to(f))
        y = self.y
        return loss(f, None if y is None else y.to(f) if y.is_floating_point() else y.to(f.device))

    def _check_mean(self, f: Tensor, L: float) -> None:
        """Raise an error if the loss is a sum over examples: it doubles when every example is repeated. A loss that knows the
        number of examples is trusted."""
        try:
            twice = self.of_rows(torch.arange(len(f)).repeat(2)).mean(torch.cat([f, f]).requires_grad_()).item()
        except ProbeError:
            return
        if L and abs(twice - 2 * L) <= 1e-5 * abs(L):
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
# by one themselves; a probe's labels are compared with the outputs as they are. Where labels equal the input ids, the model's own
# loss tells what it takes them for.

def aligned(network: Network, x: Inputs, probe: Probe, shape: torch.Size) -> tuple[Probe, str]:
    """The probe with its labels beside the outputs of ``shape`` [n, ...] that predict them, and a note if they were moved there;
    ``x``: its first examples."""
    if probe.shift is not None or not probe.holds_ids(shape) or not probe.repeats_input():
        return probe, ""
    kind, moves = type(network.model).__name__, _moves(network, x, probe)
    if moves is None:
        raise ProbeError(f"the labels y equal the input ids, and the {kind} returns no loss for labels=, so Richter cannot tell "
                         "which outputs predict them. Without a shift, each output would be compared with the token that it "
                         "has just read. Write Probe(..., shift=True) for a language model (labels=input_ids as in Hugging "
                         "Face, where each label belongs to the output before it), or shift=False if the token itself is the "
                         "label (an autoencoder, a masked language model).")
    if not moves:
        return probe, ""
    return probe.shifted(), (f"the labels equal the input ids, and a {kind} moves them by one in its own loss. Here, too, "
                             "each label belongs to the output before it (Probe(shift=True) says so, shift=False leaves labels "
                             "in place)")


def _moves(network: Network, x: Inputs, probe: Probe) -> bool | None:
    """Does the model's own loss compare a label with the output before it, or with the output at its place? None: it returns no
    loss for ``labels=``, or one that does not depend on the last label."""
    assert probe.y is not None
    accepted, f = inspect.signature(network.model.forward).parameters, network.run(x, record=False).f.detach()
    y = torch.where(probe.y == probe.ignore_index, IGNORE_INDEX, probe.y)[:len(f)].to(f.device)
    if "labels" not in accepted or f.shape[:2] != y.shape or y.shape[1] < 2:
        return None
    inputs = x if isinstance(x, dict) else dict(zip(accepted, x if isinstance(x, tuple) else (x,), strict=False))

    def loss(changed: int | None = None) -> float:
        """The model's loss, with other labels of one token."""
        labels = y.clone()
        if changed is not None:
            labels[:, changed] = (y[:, changed].clamp(min=0) + 1) % f.shape[-1]
        return forward(network.model, {**inputs, "labels": labels}, network.state, record=False,
                       output=lambda out: out["loss"] if isinstance(out, Mapping) else out[0]).f.item()

    try:
        whole, first, last = loss(), loss(0), loss(-1)
    except Exception:  # a model may fail in any way on labels that it was not meant for
        return None
    return None if last == whole else first == whole  # a loss that moves labels leaves out that of the first token
