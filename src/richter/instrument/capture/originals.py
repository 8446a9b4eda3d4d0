"""Tensors as they were: seen to have changed, by any bit, and put back in place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from richter.core import CaptureError, DisturbedError

BACKUP_BYTES = 2**28  # of copies that are kept beside one kind of tensors (weights, gradients, attributes) during a measurement
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # numbers of that many bytes, bit by bit


class Budget:
    """Bytes that may still be copied."""

    def __init__(self, left: int = BACKUP_BYTES) -> None:
        self.left = left

    def allows(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True


class Original:
    """A tensor as it is now. With a copy, every change is seen and put back; without, those that torch counts are seen."""

    def __init__(self, tensor: Tensor, copied: bool) -> None:
        self.tensor, self.version = tensor, _version(tensor)
        self.requires_grad, self.grad_fn = tensor.requires_grad, tensor.grad_fn
        self.alias = tensor.detach()  # where its numbers lie; the tensor may be given others (.data, set_, resize_)
        self.place, self.copy = _place(tensor), self.alias.clone() if copied and not tensor.is_meta else None

    def changed(self) -> bool:
        moved = _version(self.tensor) != self.version or _place(self.tensor) != self.place
        return moved or (self.copy is not None and not same_bits(self.tensor.detach(), self.copy))

    def restore(self) -> bool:
        """Is it as it was, numbers, version, place in the graph and all? Call it when it has changed."""
        t = self.tensor
        with torch.inference_mode(t.is_inference()), torch.no_grad():
            if _place(t) != self.place:
                t.data = self.alias
            if self.copy is not None:
                (t.data if t.layout is torch.strided else t).copy_(self.copy)  # .data of a sparse tensor has indices of its own
            if t.grad_fn is not self.grad_fn and self.grad_fn is None and not t._is_view():
                t.detach_()
            if t.is_leaf and t.requires_grad != self.requires_grad:
                t.requires_grad_(self.requires_grad)
        if self.version is not None and hasattr(torch._C._autograd, "_unsafe_set_version_counter"):
            torch._C._autograd._unsafe_set_version_counter((t,), (self.version,))  # a graph of the user's may have saved it
        return self.copy is not None and t.grad_fn is self.grad_fn


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Are they equal to the last bit? NaN equals the same NaN. What cannot be looked into counts as equal."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_quantized or a.is_meta or a.is_mkldnn:
        return True
    return all(p.shape == q.shape and torch.equal(_bits(p), _bits(q)) for p, q in zip(_parts(a), _parts(b), strict=True))


def _parts(t: Tensor) -> list[Tensor]:
    """The tensors in which its numbers lie."""
    if t.layout is torch.sparse_coo:
        return [t._indices(), t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices(), t.values()]
    return [t.ccol_indices(), t.row_indices(), t.values()] if t.layout in (torch.sparse_csc, torch.sparse_bsc) else [t]


def _bits(t: Tensor) -> Tensor:
    t = torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    return t.resolve_neg().view(INTEGERS[t.element_size()])


def _version(t: Tensor) -> int | None:
    return None if t.is_inference() else t._version


def _place(t: Tensor) -> tuple[int, tuple[int, ...], tuple[int, ...]] | None:
    """Where its numbers lie, and how."""
    return (t.data_ptr(), t.shape, t.stride()) if t.layout is torch.strided and not t.is_meta else None


def size_of(t: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in _parts(t))


def weight_bytes(model: nn.Module) -> int:
    return sum(size_of(p) for p in model.parameters() if p.layout is torch.strided)


@contextlib.contextmanager
def finished(finish: Callable[[], list[str]]) -> Iterator[None]:
    """``finish`` puts things back, however the block ends. The sentences that it returns are an error, or stand below the one
    that is on its way."""
    try:
        yield
    except BaseException as error:
        try:
            sentences = finish()
        except DisturbedError as disturbed:
            if not isinstance(error, Exception):
                raise error from None
            raise disturbed from error  # whatever it looked like: that is why
        for sentence in sentences:
            error.add_note(sentence)
        raise
    sentences = finish()
    if sentences:
        raise CaptureError("\n".join(sentences))
