"""Every error that Richter raises on purpose: it says what was seen, why it matters and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class RichterError(Exception):
    """Base of every error Richter raises on purpose: it says what was seen, why it matters and what to do."""


class ProbeError(RichterError, ValueError):
    """The probe (inputs, labels, mask) cannot give a right number."""


class SelectionError(RichterError, ValueError):
    """A layer, measure or option that does not exist was asked for."""


class DataError(RichterError, OSError):
    """A data set is not there, cannot be fetched, or is not what it should be."""


class CaptureError(RichterError, RuntimeError):
    """The model did something under which a number would be wrong."""


class DisturbedError(CaptureError):
    """Another thread has worked with the model while it was measured."""


class MixingError(CaptureError):
    """The output of one example depends on the other examples of its batch."""


class DivergedError(CaptureError):
    """Weights or outputs are NaN or infinite: nothing is wrong with what was asked for, but there is nothing to measure now."""


class MemoryBudgetError(RichterError, MemoryError):
    """``memory=`` cannot hold the smallest piece of work."""


class StoreError(RichterError, OSError):
    """A run could not be written or read; what was written before is intact."""


def unknown(owner: str, what: str, name: str, known: Iterable[str], of: str = "") -> SelectionError:
    """Something was asked for by a name that does not exist: say which are close, and which there are."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    return SelectionError(f"{owner} has no {what} {name!r}{of}. "
                          + (f"Close to it: {', '.join(map(repr, near))}. " if near else "")
                          + f"It has: {', '.join(map(repr, known)) or 'none'}.")
