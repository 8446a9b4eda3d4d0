"""Where measuring meets a user's question."""

from __future__ import annotations

from typing import TYPE_CHECKING

from richter.core.catalogue import lazy_names

if TYPE_CHECKING:
    from richter.workflows.awakening import features_order  # noqa: F401
    from richter.workflows.comparing import compare  # noqa: F401
    from richter.workflows.extrapolation import scaling  # noqa: F401
    from richter.workflows.outrun import acceleration  # noqa: F401

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"acceleration": "outrun", "compare": "comparing", "features_order": "awakening", "scaling": "extrapolation"},
    ("awakening", "checkpoints", "comparing", "demo", "extrapolation", "laws", "outrun", "propagation", "richness", "shares"))
