"""Hugging Face ``Conv1D`` (GPT-2): a Linear whose weight is stored transposed."""

from __future__ import annotations

from richter.layers import LinearMap, View, register
from richter.layers.linear import positions

PLAIN: View = {"": LinearMap(matrix=lambda m, w: w.T, inputs=lambda m, x: positions(x),
                             outputs=lambda m, z: positions(z))}
register("transformers.pytorch_utils.Conv1D", PLAIN)
