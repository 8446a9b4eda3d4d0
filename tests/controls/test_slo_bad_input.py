"""What Speed Limited Optimisation refuses, in words; and that its document runs."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from descents import MOMENTUM, parameters, small
from richter.controls import SLO, AdaptiveSLO, slo_groups
from richter.core import CaptureError, SelectionError

REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: SLO(parameters(), lr=-0.1), r"SLO: lr is -0.1: a finite number from 0 on is needed"),
    (lambda: SLO(parameters(), lr=0.1, speed=-1.0), "SLO: speed is -1.0"),
    (lambda: SLO(parameters(), lr=0.1, eps=-1e-3), "SLO: eps is -0.001"),
    (lambda: SLO(parameters(), lr=0.1, weight_decay=-1), "SLO: weight_decay is -1"),
    (lambda: SLO(parameters(), lr=math.nan), "SLO: lr is nan"),
    (lambda: SLO(parameters(), lr="fast"), "SLO: lr is 'fast'"),  # type: ignore[arg-type]
    (lambda: SLO([{"params": parameters(), "speed": math.inf}], lr=0.1), "SLO: speed is inf"),
    (lambda: SLO([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], lr=0.1), "complex dtype torch.complex64"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.SGD(parameters(), 0.1)), "give what makes an optimiser"),  # type: ignore[arg-type]
    (lambda: SLO(parameters(), 0.1, base="adam"), "give what makes an optimiser"),  # type: ignore[arg-type]
    (lambda: SLO(parameters(), 0.1, base=functools.partial(torch.optim.Adam, lr=0.1)), "sets lr=0.1, which would do nothing"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.AdamW), "base=AdamW looks at the weights"),
    (lambda: SLO(parameters(), 0.1, base=functools.partial(torch.optim.SGD, weight_decay=0.1)), "base=SGD looks at the weights"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.Adafactor), "base=Adafactor looks at the weights"),
    (lambda: SLO(parameters(), 0.1, base=torch.optim.LBFGS), "base=LBFGS could not take a step"),
    (lambda: slo_groups(small(), {"1": 2.0}), "the model has no layer '1'.*It has: '0', '2', '4'"),
    (lambda: slo_groups(small(), {"enc.*": 2.0}), r"the model has no layer 'enc\.\*'"),
    (lambda: slo_groups(small(), {"0": -2.0}), "the speed of '0' is -2.0"),
    (lambda: slo_groups(small(), default=math.nan), "the speed of 'default' is nan"),
    (lambda: slo_groups(small(), [1.0]), "a mapping from layers to speeds"),  # type: ignore[arg-type]
    (lambda: slo_groups(nn.ReLU()), "has no parameters"),
    (lambda: slo_groups([1]), "the model is a list"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, {"0": 1.0}), "richness=.*a function is needed"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict, s=0.5), "s=0.5"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict, every=0), "every=0: a positive number of steps"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict, every=1.5), "every=1.5"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(parameters(), 0.1, dict), "does not say which layer it is"),  # type: ignore[arg-type]
    (lambda: AdaptiveSLO(slo_groups(small(), {"0": 2.0}), 0.1, dict), "layer '0' has speed=2.0, which would do nothing"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict).step(), r"richness\(\) returned \{\}"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, lambda: {"fc": 1.0}).step(), "the optimiser has no layer 'fc'"),
    (lambda: AdaptiveSLO(slo_groups(small()), 0.1, dict).load_state_dict(SLO(small().parameters(), 0.1).state_dict()),
     "not the state of an AdaptiveSLO"),
]


@pytest.mark.parametrize(("act", "sentence"), REFUSED, ids=[s[:30] for _, s in REFUSED])
def test_bad_input_is_refused_in_words(act: Callable[[], object], sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        act()


def test_a_refused_group_is_not_added() -> None:
    params = parameters()
    optimiser = SLO(params[:1], 0.1, base=MOMENTUM)
    with pytest.raises(SelectionError, match="speed is -1"):
        optimiser.add_param_group({"params": params[1:], "speed": -1.0})
    assert len(optimiser.param_groups) == 1
    optimiser.add_param_group({"params": params[1:]})


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(CaptureError, match=r"a gradient is sparse.*sparse=False"):
        SLO(table.parameters(), 0.1).step()


def test_the_examples_of_the_document_run() -> None:
    text = (Path(__file__).parents[2] / "docs/controls.md").read_text()
    fixed, adaptive, scales = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(fixed.replace("range(600)", "range(10)"), names)
    assert [g["speed"] for g in names["optimiser"].param_groups] == [500.0, 0.002, 0.002]
    exec(adaptive.replace("range(500)", "range(11)"), names)
    assert str(names["optimiser"].history[:3]) in text
    exec(scales.replace("range(200)", "range(5)"), names)
    assert names["model"](names["x"]).abs().max() > 0
