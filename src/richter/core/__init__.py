"""The basic types that all other packages use: errors, references, intervals, rows with their marks, sizes. It imports no other
part of Richter, and neither torch nor pandas."""

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
    RichterWarning,
    Row,
    SelectionError,
    StoreError,
    matches,
    parse_bytes,
    show_bytes,
    unknown,
)

__all__ = ["WHOLE", "CaptureError", "Card", "DataError", "DisturbedError", "DivergedError", "Failure", "Interval", "Labels",
           "Mark", "MemoryBudgetError", "MixingError", "Prediction", "ProbeError", "Ref", "Remark", "RichterError",
           "RichterWarning", "Row", "SelectionError", "StoreError", "matches", "parse_bytes", "show_bytes", "unknown"]
