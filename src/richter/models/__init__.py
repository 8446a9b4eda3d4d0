"""Small, plain networks of the papers."""

from __future__ import annotations

from richter.models.gpt import GPT
from richter.models.mlp import mlp
from richter.models.vgg import vgg11

__all__ = ["GPT", "mlp", "vgg11"]
