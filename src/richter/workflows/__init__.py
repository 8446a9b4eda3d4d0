"""Workflows: complete analyses that answer one question of a user each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.catalogue import lazy_names

if TYPE_CHECKING:
    from richter.workflows.acceleration import acceleration  # noqa: F401
    from richter.workflows.compare import compare  # noqa: F401
    from richter.workflows.features_order import features_order  # noqa: F401
    from richter.workflows.layer_shares import layer_shares  # noqa: F401
    from richter.workflows.learning_curve import learning_curve  # noqa: F401
    from richter.workflows.nfc_by_layer import nfc_by_layer  # noqa: F401
    from richter.workflows.propagation import propagation  # noqa: F401
    from richter.workflows.scaling import scaling  # noqa: F401
    from richter.workflows.words import words  # noqa: F401

FUNCTIONS = ("acceleration", "compare", "features_order", "layer_shares", "learning_curve", "nfc_by_layer", "propagation",
             "scaling", "words")

__getattr__, __dir__, __all__ = lazy_names(__name__, {name: name for name in FUNCTIONS},
                                              ("checkpoints", "demo", "laws", "trend", "word_scores"))
