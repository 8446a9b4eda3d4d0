"""The small vocabulary everything else speaks: errors, references, intervals, rows with their marks, sizes. Imports nothing of
ours, and neither torch nor pandas."""

from richter.core.errors import (
    CaptureError,
    DataError,
    DisturbedError,
    DivergedError,
    MemoryBudgetError,
    MixingError,
    ProbeError,
    RichterError,
    SelectionError,
    StoreError,
    unknown,
)
from richter.core.failures import Failure
from richter.core.sizes import parse_bytes, show_bytes
from richter.core.values import WHOLE, Card, Interval, Labels, Mark, Prediction, Ref, Remark, Row, matches

__all__ = ["WHOLE", "CaptureError", "Card", "DataError", "DisturbedError", "DivergedError", "Failure", "Interval", "Labels",
           "Mark", "MemoryBudgetError", "MixingError", "Prediction", "ProbeError", "Ref", "Remark", "RichterError", "Row",
           "SelectionError", "StoreError", "matches", "parse_bytes", "show_bytes", "unknown"]
