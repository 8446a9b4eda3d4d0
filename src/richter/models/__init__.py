"""The papers' networks, small and plain."""

from __future__ import annotations

from richter.models.mlp import mlp

__all__ = ["mlp"]
