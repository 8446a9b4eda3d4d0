"""Gradients of parameters without a map, by torch.func.vmap where a model allows it and by plain autograd otherwise."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import richter
from richter import kernels
from richter.instrument import stream
from richter.instrument.capture import quiet
from richter.instrument.cotangents import every_output
from richter.instrument.stream import Chunk
from richter.kernels.ntk import prepare
from zoo import CASES, Case


@contextlib.contextmanager
def chunk_of(model: nn.Module, x: Any, output: Any = None, side_by_side: int | None = None) -> Iterator[Chunk]:
    """A chunk of all examples of x that is asked for the gradients of all parameters."""
    with quiet(model, "eval"):
        job = prepare(model, x, None, every_output, output, "full")
        names = [name for name, p in model.named_parameters() if p.requires_grad and name in job.network.state]
        yield Chunk(job.network, x, slice(0, job.n), (), job.cotangents, names, side_by_side)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_vmap_gives_what_single_examples_give(case: Case) -> None:
    with chunk_of(case.build(), case.batch(5)[0], case.output) as chunk:
        vectorised = chunk._vectorised() if chunk._vectorisable else None
        single = chunk._one_by_one()
    if vectorised is None:
        pytest.skip("this model cannot run under vmap")
    for name, J in single.items():
        torch.testing.assert_close(vectorised[name], J, rtol=1e-9, atol=1e-11)


class Gained(nn.Module):
    """out(g tanh(W x)) + shift, where g and shift are parameters without a map."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = nn.Linear(4, 6), nn.Linear(6, 2)
        self.gain, self.shift = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(2))
        self.double()

    def hidden(self, x: Tensor) -> Tensor:
        return self.gain * torch.tanh(self.inner(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.hidden(x)) + self.shift


class Asking(Gained):
    """It asks for a number in Python, which vmap refuses."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (0.0 if x.isnan().any().item() else 2.0)


class Remembering(Gained):
    """It keeps its last activations, as many research models do."""

    def hidden(self, x: Tensor) -> Tensor:
        self.last = super().hidden(x)
        return self.last


class Rare(Gained):
    """Examples with a large first entry use the gain in another way."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + (x[:, :1] > 1.0) * self.gain**3


class Twofold(Gained):
    """It computes something else under vmap, without an error."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * (2.0 if torch._C._functorch.is_gradtrackingtensor(x) else 1.0)


def by_hand(model: nn.Module, x: Tensor) -> Tensor:
    """The kernel "n n" of all parameters, summed over outputs, from gradients of single examples."""
    parameters = list(model.parameters())
    J = torch.stack([torch.stack([torch.cat([d.reshape(-1) for d in torch.autograd.grad(f_k, parameters, retain_graph=True)])
                                  for f_k in model(x_n[None])[0]]) for x_n in x])
    return torch.einsum("nkp,mkp->nm", J, J)


@pytest.mark.parametrize("build", [Gained, Asking, Remembering, Rare])
def test_the_kernel_is_exact_whether_or_not_vmap_works(build: type[Gained]) -> None:
    model, x = build(), torch.randn(9, 4, dtype=torch.float64)
    x[7, 0] = 3.0
    torch.testing.assert_close(kernels.ntk(model, x, memory="1 GB"), by_hand(model, x), rtol=1e-10, atol=1e-10)


def test_a_model_that_refuses_vmap_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[int] = []
    by_vmap = stream.by_vmap

    def counted(*args: Any, **kwargs: Any) -> Any:
        tries.append(1)
        return by_vmap(*args, **kwargs)

    monkeypatch.setattr(stream, "by_vmap", counted)
    x = torch.randn(8, 4, dtype=torch.float64)
    with chunk_of(Asking(), x) as chunk:
        chunk.gradients  # noqa: B018
        again = Chunk(chunk.network, x, slice(0, 8), (), chunk.cotangents, chunk.parameters)
        again.gradients  # noqa: B018
    assert len(tries) == 1
    with chunk_of(Gained(), x) as chunk:
        chunk.gradients  # noqa: B018
    assert len(tries) == 5  # four quarters of the chunk


def test_what_vmap_computes_is_compared_with_a_backward_pass() -> None:
    with chunk_of(Twofold(), torch.randn(8, 4, dtype=torch.float64)) as chunk:
        assert chunk._vectorised() is None


@pytest.mark.parametrize("side_by_side", [2, 3, 8])
def test_how_many_examples_run_side_by_side_changes_no_number(side_by_side: int) -> None:
    model, x = Gained(), torch.randn(8, 4, dtype=torch.float64)
    with chunk_of(model, x, side_by_side=side_by_side) as chunk:
        J = chunk.gradients
    with chunk_of(model, x, side_by_side=1) as chunk:
        single = chunk.gradients
    for name in J:
        torch.testing.assert_close(J[name], single[name], rtol=1e-12, atol=1e-13)


# ------------------------------------------------------------------------------------------- maps that all examples share


class Relative(nn.Module):
    """Attention with a table of relative positions, which all examples read alike (Swin, T5)."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(4, 12), nn.Linear(4, 2)
        self.table = nn.Parameter(torch.randn(9, 2))
        self.register_buffer("index", torch.arange(5)[:, None] - torch.arange(5)[None] + 4)
        self.blocks = blocks
        self.double()

    def scores(self, s: Tensor) -> Tensor:
        return s + self.table[self.index.view(-1)].view(5, 5, 2).permute(2, 0, 1)[None]

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.blocks):  # the table is read several times
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, 2).permute(2, 0, 3, 1, 4)
            x = x + (self.scores(q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2)
        return self.out(x.mean(1))


class AskingRelative(Relative):
    """It asks for a number in Python, which vmap refuses."""

    def scores(self, s: Tensor) -> Tensor:
        return super().scores(s) * (0.0 if s.isnan().any().item() else 1.0)


class TwofoldRelative(Relative):
    """It computes something else under vmap, without an error."""

    def scores(self, s: Tensor) -> Tensor:
        return super().scores(s) * (2.0 if torch._C._functorch.peek_interpreter_stack() is not None else 1.0)


def rows_of(model: nn.Module, monkeypatch: pytest.MonkeyPatch, vectorised: bool, **options: Any) -> dict[tuple[str, str], Any]:
    """nfc, cnfc and tangent_cka, and how often vmap was asked."""
    if not vectorised:
        monkeypatch.setattr(Chunk, "_vectorisable", False)
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(12, 5, 4, generator=draw, dtype=torch.float64)
    initial = {k: v + 0.1 if v.is_floating_point() else v for k, v in model.state_dict().items()}
    probe = richter.Probe(x, torch.arange(12) % 2)
    snap = richter.measure(model, probe, ["nfc", "cnfc", "tangent_cka"], initial=initial, **options)
    monkeypatch.undo()
    return {(r.layer, r.measure): r for r in snap.rows}


@pytest.mark.parametrize("options", [{}, {"memory": "3MB"}, {"layers": ["table"]}], ids=["all", "little memory", "one layer"])
@pytest.mark.parametrize("build", [Relative, AskingRelative, TwofoldRelative])
def test_a_table_that_all_examples_share(build: type[Relative], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = build()
    together, singly = (rows_of(model, monkeypatch, vectorised, **options) for vectorised in (True, False))
    assert ("table", "nfc") in together
    assert together.keys() == singly.keys()
    for key, row in together.items():
        assert row.mark is singly[key].mark
        assert row.value == pytest.approx(singly[key].value, rel=1e-10)
        assert row.error == pytest.approx(singly[key].error, rel=1e-6, nan_ok=True)


@pytest.mark.parametrize(("build", "works"), [(Relative, True), (AskingRelative, False), (TwofoldRelative, False)])
def test_whether_a_shared_table_goes_through_vmap(build: type[Relative], works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Captures by vmap are compared with a backward pass, and single examples take their place where they are wrong."""
    answers: list[bool] = []
    shared = Chunk._shared_by_vmap

    def noted(self: Chunk, *args: Any) -> Any:
        captures = shared(self, *args)
        answers.append(captures is not None)
        return captures

    monkeypatch.setattr(Chunk, "_shared_by_vmap", noted)
    torch.manual_seed(0)
    rows_of(build(), monkeypatch, vectorised=True, layers=["table"])
    assert answers
    assert set(answers) == {works}
