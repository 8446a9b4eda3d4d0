"""Small, plain networks used in the papers."""

from __future__ import annotations

from richter.models.gpt import GPT
from richter.models.mlp import mlp
from richter.models.modular import modular_transformer
from richter.models.resnet import resnet18
from richter.models.vgg import vgg11
from richter.models.vgg16 import vgg16
from richter.models.vgg19 import vgg19

__all__ = ["GPT", "mlp", "modular_transformer", "resnet18", "vgg11", "vgg16", "vgg19"]
