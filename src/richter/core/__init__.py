"""The small vocabulary everything else speaks: errors, references, intervals, rows with their marks, sizes. Imports nothing of
ours, and neither torch nor pandas."""

from richter.core.values import (
    WHOLE,
    CaptureError,
    Card,
    DataError,
    DisturbedError,
    DivergedError,
    Failure,
    Interval,
    Labels,
    Mark,
    MemoryBudgetError,
    MixingError,
    Prediction,
    ProbeError,
    Ref,
    Remark,
    RichterError,
    Row,
    SelectionError,
    StoreError,
    matches,
    parse_bytes,
    show_bytes,
    unknown,
)

__all__ = ["WHOLE", "CaptureError", "Card", "DataError", "DisturbedError", "DivergedError", "Failure", "Interval", "Labels",
           "Mark", "MemoryBudgetError", "MixingError", "Prediction", "ProbeError", "Ref", "Remark", "RichterError", "Row",
           "SelectionError", "StoreError", "matches", "parse_bytes", "show_bytes", "unknown"]
