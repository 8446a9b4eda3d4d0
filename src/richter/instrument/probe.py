"""The fixed examples on which a model is measured: ``Probe``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from richter.core import ProbeError
from richter.instrument.capture import copy_of
from richter.instrument.captures import count, select
from richter.instrument.loaders import batches, pair, undisturbed
from richter.instrument.targets import WRITTEN, OneHot

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
