"""Everything between a user's model and its rows, in the order in which data flows: probe, subject, capture, survey, stream,
statistics, evaluate, observe."""

from richter.core.catalogue import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, {}, ("capture", "cotangents", "evaluate", "observe", "probe",
                                                          "snapshot", "statistics", "stream", "subject", "survey", "verdict"))
