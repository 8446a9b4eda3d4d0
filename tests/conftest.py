"""Shape annotations are checked while tests run; every test owns its randomness."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))

with install_import_hook("richter", "checker.typechecked"):
    import richter.evaluate
    import richter.kernels
    import richter.measures.alignment
    import richter.measures.fact
    import richter.measures.nfa
    import richter.observe  # noqa: F401

import torch

DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU here")])]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and a GPU where there is one."""
    return request.param
