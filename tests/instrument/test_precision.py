"""Single and half precision, and models that are compiled or wrapped."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import richter
from observing import assert_close, examples, mlp, moved, probe, state


def test_single_precision_agrees_with_double(device: str) -> None:
    x, y = examples()
    model, start = moved(mlp()).to(device), state(mlp())
    double = richter.measure(model, richter.Probe(x, y), initial=start)
    single = richter.measure(model.float(), richter.Probe(x.float(), y), initial=start)
    assert_close(single, double, rel=1e-4, errors=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gives_numbers(dtype: torch.dtype, device: str) -> None:
    x, y = examples()
    model = moved(mlp()).to(device)
    double = richter.measure(model, richter.Probe(x, y), initial=state(mlp()))
    half = richter.measure(model.to(dtype), richter.Probe(x.to(dtype), y), initial=state(mlp()))
    assert {r.measure for r in double.rows if math.isnan(r.value)} == {"function_change", "feature_change_cka"}
    for r in half.rows:
        expected = double.value(r.measure, r.layer)
        assert math.isfinite(r.value) or math.isnan(expected), r  # of the read-out, and of features on so few examples
        assert math.isnan(expected) or r.value == pytest.approx(expected, rel=0.2, abs=0.05), r


@contextlib.contextmanager
def one_process(folder: Path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["compile", "compile in place", "DataParallel", "DistributedDataParallel", "both"])
def test_wrapped_models_are_measured_like_their_inner_ones(wrapper: str, tmp_path: Path) -> None:
    model, start = moved(mlp()), state(mlp())
    expected = richter.measure(model, probe(), initial=start)
    torch._dynamo.reset()
    with contextlib.ExitStack() as stack:
        if wrapper in ("DistributedDataParallel", "both"):
            stack.enter_context(one_process(tmp_path))
        wrapped: Any = model
        if wrapper == "compile in place":
            model.compile(backend="eager")
        elif wrapper == "compile":
            wrapped = torch.compile(model, backend="eager")
        elif wrapper == "DataParallel":
            wrapped = nn.DataParallel(model)
        elif wrapper == "DistributedDataParallel":
            wrapped = nn.parallel.DistributedDataParallel(model)
        else:
            wrapped = nn.parallel.DistributedDataParallel(torch.compile(model, backend="eager"))
        wrapped(examples()[0]).sum().backward()
        prefix = next(iter(wrapped.state_dict())).removesuffix("0.weight")
        for names in (start, {f"{prefix}{k}": v for k, v in start.items()}):
            snap = richter.measure(wrapped, probe(), initial=names)
            assert snap.layers == ["0", "2", "4", "*"]
            assert_close(snap, expected)
        watch = richter.Observer(wrapped, probe(), when=1, budget=None)
        watch(0)
        moved(model)
        late = watch(1)
        assert late is not None
        assert late.value("weight_change", "0") > 0
    torch._dynamo.reset()
