"""Every bad input gets an error that says what was seen, why it matters and what to do; the model is left as it was.

These tests use the library as a user imports it, without the shape checker of the other tests: a wrong type must reach
the library's own checks. `refused` reads the sentence of an error and compares the model before and after.
"""

from __future__ import annotations

import importlib
import math
import random
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

NAN, INF = math.nan, math.inf
N = 12  # examples: more than a survey looks at
EXTRA = ["double_centred_nfc", "ptk_centred_nfc"]  # measures that run the initial network


def _ours() -> dict[str, ModuleType]:
    return {name: module for name, module in sys.modules.items() if name.partition(".")[0] == "richter"}


@pytest.fixture(scope="module")
def richter() -> Iterator[ModuleType]:
    """The library without the tests' type checker in front of it."""
    checked = _ours()
    for name in checked:
        del sys.modules[name]
    yield importlib.import_module("richter")
    for name in _ours():
        del sys.modules[name]
    sys.modules.update(checked)


@pytest.fixture(scope="module", autouse=True)
def _importable(richter: ModuleType) -> None:
    """Every test of this file finds the plain library under its name."""


# ------------------------------------------------------------------------------------------ models, data, and watching


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def initialised(model: nn.Module, seed: int = 0) -> nn.Module:
    """float64, normal weights, half of the modules in train mode and half in eval mode."""
    model = model.double()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draw, dtype=p.dtype) / max(1, p.shape[-1] if p.dim() else 1) ** 0.5)
    for i, m in enumerate(model.modules()):
        m.training = i % 2 == 0
    return model


def mlp(seed: int = 0, **options: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(5, 6, **options), nn.Tanh(), nn.Linear(6, 4, **options), nn.Tanh(), nn.Linear(4, 3))
    initialised(model, seed)
    return model


class After(nn.Module):
    """`then` of a perceptron's output."""

    def __init__(self, then: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.net, self.then = mlp(), then
        initialised(self)

    def forward(self, x: Tensor) -> Any:
        return self.then(self.net(x))


class Before(After):
    """A perceptron of `then` of the input."""

    def forward(self, x: Tensor) -> Any:
        return self.net(self.then(x))


class Two(nn.Module):
    """Two layers, put together by `how(self, x)`."""

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.how = nn.Linear(5, 6), nn.Linear(6, 3), how
        initialised(self)

    def forward(self, x: Tensor) -> Any:
        return self.how(self, x)


X, Y = normal(N, 5, seed=7), torch.arange(N) % 3
STATE = mlp(seed=1).state_dict()


def changed(t: Tensor, where: Any, value: float) -> Tensor:
    t = t.clone()
    t[where] = value
    return t


def hooks(model: nn.Module) -> list[int]:
    """How many of each kind of hook every module carries."""
    kinds = ("_hooks", "_kwargs")
    return [len(value) for m in model.modules() for key, value in vars(m).items() if key.endswith(kinds)]


def surroundings(model: Any) -> dict[str, Any]:
    """Everything a measurement could disturb."""
    inside: dict[str, Any] = {}
    if isinstance(model, nn.Module):
        tensors = [*model.parameters(), *model.buffers()]
        whole = [t for t in tensors if not isinstance(t, nn.parameter.UninitializedTensorMixin) and not t.is_meta]
        inside = {
            "modes": [m.training for m in model.modules()],
            "hooks": hooks(model),
            "forwards": [type(m).forward for m in model.modules()] + ["forward" in vars(m) for m in model.modules()],
            "tensors": [id(t) for t in tensors],
            "trainable": [(t.requires_grad, t.grad is None) for t in tensors],
            "values": [t.detach().clone().numpy().tobytes() for t in whole],
        }
    return inside | {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": np.random.get_state()[1].tobytes(),  # noqa: NPY002
        "python": random.getstate(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "interception": torch._C._len_torch_function_stack(),
        "checkpointing": torch.utils.checkpoint.CheckpointFunction,
    }


@contextmanager
def undisturbed(model: Any) -> Iterator[None]:
    """Assert that the model and the random streams are afterwards as before."""
    before = surroundings(model)
    yield
    after = surroundings(model)
    assert [key for key in before if before[key] != after[key]] == []


@contextmanager
def refused(sentence: str, *sentences: str, model: Any = None) -> Iterator[None]:
    """Assert that an error of the library's own kind is raised, whose text matches every pattern, and that nothing else
    happened."""
    core = importlib.import_module("richter.core")
    with undisturbed(model), pytest.raises(core.RichterError) as caught:
        yield
    for pattern in (sentence, *sentences):
        assert re.search(pattern, str(caught.value)), f"{pattern!r} is not in: {caught.value}"


def many(*cases: tuple[Any, ...]) -> Any:
    """Rows (id, value, pattern, ...) of a parametrised test."""
    return [pytest.param(*case[1:], id=case[0]) for case in cases]


def test_the_watch_sees_what_is_disturbed() -> None:
    model = mlp()
    for disturb in (
        lambda: model[0].train(not model[0].training),
        lambda: model[2].register_forward_hook(lambda *_: None),
        lambda: model[2].register_forward_pre_hook(lambda *_: None),
        lambda: model[0].weight.requires_grad_(False),
        lambda: model[4].bias.data.add_(1e-9),
        lambda: torch.rand(1),
        lambda: np.random.rand(),  # noqa: NPY002
        lambda: random.random(),
        lambda: torch.set_grad_enabled(False),
    ):
        with torch.random.fork_rng(devices=[]), torch.enable_grad(), pytest.raises(AssertionError), undisturbed(model):
            disturb()


def test_errors_are_of_one_family(richter: ModuleType) -> None:
    core = richter.core
    for kind in (core.ProbeError, core.SelectionError, core.CaptureError, core.MixingError, core.MemoryBudgetError):
        assert issubclass(kind, richter.RichterError)


# --------------------------------------------------------------------------------------------------------- the probe


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("row", [0, N - 1])
def test_not_a_number_in_x_or_y(richter: ModuleType, bad: float, row: int) -> None:
    with refused(rf"x contains NaN or Inf \(examples {row}\)", "every statistic would be NaN", "Remove or repair"):
        richter.Probe(changed(X, (row, 2), bad), Y)
    with refused(rf"x\['b'\] contains NaN or Inf \(examples {row}\)"):
        richter.Probe({"a": X, "b": changed(X, (row, 2), bad)}, Y)
    with refused(rf"y contains NaN or Inf \(examples {row}\)", "Remove or repair"):
        richter.Probe(X, changed(normal(N, 3), (row, 1), bad))
    with refused(rf"y contains NaN or Inf \(examples {row}\)"):
        richter.Probe(X.numpy(), changed(normal(N), row, bad).numpy())


@pytest.mark.parametrize(("x", "y", "sentence"), many(
    ("no example", X[:0], Y[:0], r"the probe is empty: x holds no example.*Probe\(x\[:256\], y\[:256\]\)"),
    ("an empty list", [], [], "the probe is empty"),
    ("an empty dict", {}, Y, "the probe is empty|x holds no|x is an empty dict"),
    ("one example", X[:1], Y[:1], "the probe has one example.*at least two"),
    ("a number", torch.tensor(3.0), Y, "first axis of each must be the examples"),
    ("nothing", None, Y, "x is a NoneType that cannot be read as numbers"),
    ("words", ["a", "b"], Y, "x is a list that cannot be read as numbers"),
    ("lengths in a tuple", (X, X[:5]), Y, r"parts of x have different numbers of examples \(\[5, 12\]\).*first axis"),
    ("lengths in a dict", {"a": X, "b": X[:7]}, Y, r"parts of x have different numbers of examples \(\[7, 12\]\)"),
    ("complex x", X + 1j, Y, "x has complex dtype torch.complex128.*real and imaginary parts as two channels"),
    ("complex part", (X, X + 1j), Y, r"x\[1\] has complex dtype torch.complex128"),
    ("complex y", X, normal(N, 3) + 1j, "y has complex dtype torch.complex128"),
    ("y too short", X, Y[:5], r"y has shape \(5,\) but x has 12 examples: one label is needed for each"),
    ("y a number", X, torch.tensor(1), r"y has shape \(\) but x has 12 examples"),
    ("y negative", X, Y - 1, "y contains -1: class ids start at 0.*-100 means no label"),
    ("y all ignored", X, torch.full((N,), -100), r"every label is ignore_index \(-100\).*nothing to align with"),
    ("one class", X, torch.full((N,), 2), r"all labels are 2: with one class.*several classes.*balanced=True.*y=None"),
    ("one class and ignored", X, torch.where(Y == 0, -100, 2), "all labels are 2"),
    ("y words", X, np.array(["cat", "dog"] * 6), "y is a ndarray that cannot be read as numbers"),
))  # fmt: skip
def test_a_probe_that_cannot_be_right(richter: ModuleType, x: Any, y: Any, sentence: str) -> None:
    with refused(sentence):
        richter.Probe(x, y)


@pytest.mark.parametrize(("options", "sentence"), many(
    ("chunk zero", {"chunk": 0}, r"Probe\(chunk=0\): a positive whole number is needed"),
    ("chunk negative", {"chunk": -3}, r"Probe\(chunk=-3\): a positive whole number"),
    ("chunk fraction", {"chunk": 2.5}, r"Probe\(chunk=2.5\): a positive whole number"),
    ("chunk word", {"chunk": "a"}, r"Probe\(chunk='a'\): a positive whole number"),
    ("chunk true", {"chunk": True}, r"Probe\(chunk=True\): a positive whole number"),
    ("chunk none", {"chunk": None}, r"Probe\(chunk=None\): a positive whole number"),
    ("kernel zero", {"kernel_examples": 0}, r"Probe\(kernel_examples=0\): a positive whole number"),
    ("kernel fraction", {"kernel_examples": 2.5}, r"Probe\(kernel_examples=2.5\): a positive whole number"),
    ("kernel true", {"kernel_examples": True}, r"Probe\(kernel_examples=True\): a positive whole number"),
    ("kernel one", {"kernel_examples": 1}, r"Probe\(kernel_examples=1\): a kernel needs at least two examples"),
    ("mask without positions", {"mask": torch.ones(N)}, r"mask has shape \(12,\) for 12 examples; \[n, T\] is needed"),
    ("mask of fewer examples", {"mask": torch.ones(5, 3)}, r"mask has shape \(5, 3\) for 12 examples"),
    ("mask all false", {"mask": torch.zeros(N, 3)}, "mask is False everywhere.*no position is left"),
    ("loss a word", {"loss": "mse"}, r"Probe\(loss='mse'\): a function loss\(f, y\) is needed, e.g. torch.nn.MSELoss\(\)"),
    ("decay negative", {"weight_decay": -1e-4}, r"Probe\(weight_decay=-0.0001\).*not negative"),
    ("decay not a number", {"weight_decay": NAN}, r"Probe\(weight_decay=nan\): the objective is loss \+ weight_decay/2"),
    ("decay infinite", {"weight_decay": INF}, r"Probe\(weight_decay=inf\)"),
    ("decay a word", {"weight_decay": "1e-4"}, r"Probe\(weight_decay='1e-4'\)"),
    ("decay true", {"weight_decay": True}, r"Probe\(weight_decay=True\)"),
))  # fmt: skip
def test_options_of_a_probe(richter: ModuleType, options: dict[str, Any], sentence: str) -> None:
    with refused(sentence):
        richter.Probe(X, Y, **options)


@pytest.mark.parametrize(("loss", "sentence"), many(
    ("NaN", lambda f, y: f.sum() * NAN, r"Probe\(loss=<lambda>\) is NaN or Inf on the probe.*diverged"),
    ("Inf", lambda f, y: (f.square() / 0).mean(), "is NaN or Inf on the probe"),
    ("NaN gradient", lambda f, y: (f - f.detach()).abs().sqrt().sum(), "gradient of .* in the outputs is NaN or Inf"),
    ("by output", nn.MSELoss(reduction="none"), r"Probe\(loss=MSELoss\) returned numbers of shape \(12, 3\) for 12 examples"),
    ("too short", lambda f, y: f[:5, 0], r"returned numbers of shape \(5,\) for 12 examples.*one number for each"),
    ("a number", lambda f, y: 1.0, "returned a float for 12 examples"),
    ("whole numbers", lambda f, y: (f.argmax(1) != y).sum(), r"returned numbers of shape \(\)"),
    ("detached", lambda f, y: f.detach().square().mean(), "does not depend on the outputs in a way that autograd can follow"),
    ("constant", lambda f, y: torch.tensor(1.0), "does not depend on the outputs"),
    ("sum", nn.CrossEntropyLoss(reduction="sum"), "is a sum over examples: it doubles when each is given twice"),
    ("own sum", lambda f, y: f.square().sum(), "is a sum over examples"),
    ("broken", lambda f, y: f @ y, r"failed on outputs of shape \(12, 3\) and labels of shape \(12,\) \(RuntimeError: "),
    ("arguments", lambda f: f, r"failed on outputs .*TypeError.*It is called as loss\(f, y\) with all examples"),
    ("weights of other classes", nn.CrossEntropyLoss(weight=torch.ones(7)), r"Probe\(loss=CrossEntropyLoss\) failed"),
))  # fmt: skip
def test_a_loss_that_cannot_be_right(richter: ModuleType, loss: Any, sentence: str) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, Y, loss=loss, weight_decay=0.1), ["fact"])


def test_a_loss_of_labels_without_labels(richter: ModuleType) -> None:
    model = mlp()
    with refused(r"Probe\(loss=CrossEntropyLoss\) failed on outputs of shape \(12, 3\) and labels of shape None", model=model):
        richter.measure(model, richter.Probe(X, None, loss=nn.CrossEntropyLoss(), weight_decay=0.1), ["fact"])


def test_a_loss_of_outputs_that_do_not_count(richter: ModuleType) -> None:
    model, y = mlp(), torch.where(Y == 1, -100, Y)
    for loss in (nn.MSELoss(), lambda f, y: f.square().mean()):
        with refused("depends on outputs that do not count", "Leave loss= out", "all 12 examples at once", model=model):
            richter.measure(model, richter.Probe(X, y, loss=loss, weight_decay=0.1), ["fact"])


@pytest.mark.parametrize(("y", "options", "sentence"), many(
    ("too large", Y + 1, {}, r"y contains label 3, but the model has 3 outputs \(labels 0 to 2\).*start at 1"),
    ("tokens for classes", Y[:, None].repeat(1, 4), {}, r"y has shape \(12, 4\).*has shape \[n, 3\].*\[n\] are needed"),
    ("targets too wide", normal(N, 4), {}, r"y has shape \(12, 4\) but.*shape \(12, 3\).*Give class ids \[n\], "),
    ("targets too few", normal(N), {}, r"y has shape \(12,\) but the model's output has shape \(12, 3\)"),
    ("mask too wide", Y, {"mask": torch.ones(N, 4)}, r"mask has 4 positions, but.*\(12, 3\).*second axis.*output="),
))  # fmt: skip
def test_labels_that_do_not_fit_the_outputs(
    richter: ModuleType, y: Tensor, options: dict[str, Any], sentence: str
) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, y, **options))


@pytest.mark.parametrize("bad", [(X, Y), None, X, {"x": X}])
def test_something_else_than_a_probe(richter: ModuleType, bad: Any) -> None:
    model, kind = mlp(), type(bad).__name__
    with refused(rf"probe is a {kind}; make one with richter.Probe\(x, y\)", model=model):
        richter.measure(model, bad)
    with refused(rf"probe is a {kind}", model=model):
        richter.Observer(model, bad)(0)


# --------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("bad", [None, lambda x: x, "model", {}])
def test_something_else_than_a_model(richter: ModuleType, bad: Any) -> None:
    with refused(rf"{type(bad).__name__}", "nn.Module"):
        richter.measure(bad, richter.Probe(X, Y))
    with refused(rf"{type(bad).__name__}", "nn.Module"):
        richter.kernels.ntk(bad, X)


@pytest.mark.parametrize("bad", [NAN, INF])
def test_not_a_number_in_a_weight(richter: ModuleType, bad: float) -> None:
    model = mlp()
    model[2].weight.data[0, 1] = bad
    sentences = (r"parameter '2.weight' contains NaN or Inf: the run has diverged", "lower the learning rate")
    with refused(*sentences, model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused(*sentences, model=model):
        richter.Observer(model, richter.Probe(X, Y))
    with refused("contains NaN or Inf", model=model):
        richter.kernels.ntk(model, X)


@pytest.mark.parametrize("row", [0, N - 1])  # also behind the examples that a survey looks at
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("measures", [None, ["nfc"], ["tangent_cka"], "ntk"])
def test_not_a_number_in_an_output(richter: ModuleType, row: int, bad: float, measures: Any) -> None:
    """One example is mapped to NaN although it and all weights are finite."""
    x = changed(X, (row, 0), 99.0)
    model = Before(lambda x: x * torch.where(x[:, :1] == 99.0, bad, 1.0))
    with refused("output.*contains NaN or Inf", model=model):
        if measures == "ntk":
            richter.kernels.ntk(model, x)
        else:
            richter.measure(model, richter.Probe(x, Y), measures)


def test_a_model_without_parameters(richter: ModuleType) -> None:
    model = nn.Sequential(nn.Flatten(), nn.ReLU())
    with refused("the model has no parameters, so there is no layer to measure", model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused("no parameters|no trainable parameter", model=model):
        richter.kernels.ntk(model, X)


class Gain(nn.Module):
    """x times a vector of weights."""

    def __init__(self, trained: bool, used: bool = True) -> None:
        super().__init__()
        self.gain, self.used = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=trained), used

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :3] * (self.gain if self.used else 1.0)


def test_a_model_without_a_weight_layer(richter: ModuleType) -> None:
    model = Gain(trained=False)
    with refused("no weight layer was found", "Is it an empty container, or are its weights buffers", model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused("no trainable parameter", model=model):
        richter.kernels.ntk(model, X)
    snap = richter.measure(Gain(trained=True), richter.Probe(X, Y))  # it has a tangent kernel and outputs, and nothing else
    assert snap.layers == ["", "*"]
    assert snap.measures == ["tangent_alignment", "tangent_cka", "linearisation_gap", "magnitude", "feature_change_cka",
                             "probe_loss", "probe_accuracy", "output_spread", "output_rms"]


@pytest.mark.parametrize("model", many(
    ("unused parameter", Gain(trained=True, used=False)),
    ("detached", After(lambda z: z.detach())),
    ("no_grad", After(torch.no_grad()(lambda z: z.clone()))),
    ("inference_mode", After(torch.inference_mode()(lambda z: z.clone()))),
))  # fmt: skip
def test_an_output_that_depends_on_no_parameter(richter: ModuleType, model: nn.Module) -> None:
    with refused("output.*(does not depend on|no gradient|detach|no_grad)", model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused("output.*(does not depend on|no gradient|detach|no_grad)", model=model):
        richter.kernels.ntk(model, X)


@pytest.mark.parametrize(("then", "sentence"), many(
    ("dict", lambda z: {"b": z, "a": z}, r"returned a dict with \['a', 'b'\].*not known.*output=lambda out: out\["),
    ("empty dict", lambda z: {}, r"returned a dict with \[\].*output=lambda"),
    ("nothing", lambda z: None, "returned NoneType, not a tensor.*output=lambda out"),
    ("words", lambda z: "cat", "returned str, not a tensor.*output=lambda out"),
    ("empty tuple", lambda z: (), "returned tuple, not a tensor"),
    ("numpy", lambda z: z.detach().numpy(), "returned ndarray, not a tensor"),
    ("classes", lambda z: z.argmax(-1), r"output has dtype torch.int64.*real outputs.*output="),
    ("complex", lambda z: z + 1j, r"output has dtype torch.complex128.*real outputs"),
    ("loss", lambda z: z.mean(), r"output has shape \(\) for 8 examples.*first axis.*output=.*loss averaged"),
    ("classes first", lambda z: z.T, r"output has shape \(3, 8\) for 8 examples.*first axis.*pick or transpose"),
    ("half the examples", lambda z: z[::2], r"output has shape \(4, 3\) for 8 examples"),
    ("no output at all", lambda z: z[:, :0], r"output has shape \(8, 0\)"),
    ("nan", lambda z: z * NAN, "output on the probe contains NaN or Inf.*diverged run"),
))  # fmt: skip
def test_what_a_model_returns(richter: ModuleType, then: Callable[[Tensor], Any], sentence: str) -> None:
    model = After(then)
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused(sentence, model=model):
        richter.kernels.ntk(model, X)


def test_one_output_without_an_axis_is_one_output(richter: ModuleType) -> None:
    """z.squeeze(-1) is how most regression models end."""
    y, flat, kept = normal(N, seed=3), After(lambda z: z[:, 0]), After(lambda z: z[:, :1])
    a, b = (richter.measure(model, richter.Probe(X, y)) for model in (flat, kept))
    assert [(r.layer, r.measure) for r in a.rows] == [(r.layer, r.measure) for r in b.rows]
    np.testing.assert_allclose([r.value for r in a.rows], [r.value for r in b.rows], rtol=1e-10)
    assert torch.equal(richter.kernels.ntk(flat, X), richter.kernels.ntk(kept, X))


@pytest.mark.parametrize(("output", "sentence"), many(
    ("list", lambda out: [out], "output= returned list, not a tensor.*one floating point tensor with the"),
    ("nothing", lambda out: None, "output= returned NoneType, not a tensor"),
    ("number", lambda out: 1.0, "output= returned float, not a tensor"),
    ("classes", lambda out: out.argmax(-1), "output has dtype torch.int64"),
    ("loss", lambda out: out.mean(), r"output has shape \(\) for 8 examples"),
    ("detached", lambda out: out.detach(), "output.*(does not depend on|no gradient|detach|no_grad)"),
    ("a name", "logits", "output='logits'.*(function|callable)"),
))  # fmt: skip
def test_what_output_picks(richter: ModuleType, output: Any, sentence: str) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, Y), output=output)
    with refused(sentence, model=model):
        richter.kernels.ntk(model, X, output=output)
    with refused(sentence, model=model):
        richter.kernels.ptk(model, X, "0", output=output)


class Failing(nn.Module):
    """Raises in its pass number `last`, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.last = mlp(), 0
        initialised(self)

    def forward(self, x: Tensor) -> Tensor:
        z = self.net[0](x)
        COUNTED.append(x)
        if len(COUNTED) > self.last:
            raise KeyError("boom")
        return self.net[1:](z)


COUNTED: list[Tensor] = []  # outside the model, whose own attributes a measurement puts back


@pytest.mark.parametrize("ask", many(
    ("measure", lambda r, model: r.measure(model, r.Probe(X, Y), ["nfc", *EXTRA, "tangent_cka"],
                                           initial={k: v + 1 for k, v in model.state_dict().items()})),
    ("measure in train mode", lambda r, model: r.measure(model, r.Probe(X, Y), mode="train")),
    ("observe", lambda r, model: r.Observer(model, r.Probe(X, Y))(0)),
    ("ntk", lambda r, model: r.kernels.ntk(model, X)),
    ("ptk", lambda r, model: r.kernels.ptk(model, X, "net.0")),
))  # fmt: skip
def test_an_error_of_the_model_itself_is_not_hidden(richter: ModuleType, ask: Callable[[Any, nn.Module], Any]) -> None:
    """It comes through in whichever pass it is raised, and the model is as before."""
    model, failed = Failing(), 0
    for last in range(100):
        COUNTED.clear()
        model.last = last
        with undisturbed(model):
            try:
                ask(richter, model)
            except (KeyError, richter.RichterError) as error:
                seen = str(error)
            else:
                break
        assert "boom" in seen
        failed += 1
    assert 3 <= failed < 99


def test_complex_parameters(richter: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: complex modules are a new feature
        model = nn.Sequential(nn.Linear(5, 3).to(torch.complex128))
    with refused("'0.weight' has complex dtype torch.complex128", "split real and imaginary", model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused("complex", model=model):
        richter.kernels.ntk(model, X)
    with refused("complex", model=(model := mlp())):
        richter.kernels.ntk(model, X + 1j)


@pytest.mark.parametrize("model", many(
    ("weights", nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)).double()),
    ("running statistics", nn.Sequential(nn.Linear(5, 4), nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 3)).double()),
))  # fmt: skip
def test_lazy_modules(richter: ModuleType, model: nn.Module) -> None:
    for ask in (
        lambda: richter.measure(model, richter.Probe(X, Y)),
        lambda: richter.Observer(model, richter.Probe(X, Y))(0),
        lambda: richter.kernels.ntk(model, X),
    ):
        with refused(r"is not initialised yet \(a lazy module\)", "run one batch through the model", model=model):
            ask()
    model(X)
    assert math.isfinite(richter.measure(model, richter.Probe(X, Y)).value("nfc", "0"))


def test_a_model_without_data(richter: ModuleType) -> None:
    model = mlp().to("meta")
    with refused("meta", model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused("meta", model=model):
        richter.kernels.ntk(model, X)


class WithWholeNumbers(nn.Module):
    """A perceptron beside parameters that are whole numbers, the first parameter among them."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.arange(3), requires_grad=False)
        self.table = nn.Parameter(torch.arange(9, dtype=torch.int8).reshape(3, 3), requires_grad=False)
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        return z + self.shift + z @ self.table.to(z)


def test_whole_numbers_beside_weights(richter: ModuleType) -> None:
    model = WithWholeNumbers()
    table = model.table.double()
    plain = richter.measure(model.net, richter.Probe(X, Y), output=lambda z: z + torch.arange(3) + z @ table)
    with undisturbed(model):
        snap = richter.measure(model, richter.Probe(X, Y))
    assert snap.layers == ["net.0", "net.2", "net.4", "*"]
    np.testing.assert_allclose([r.value for r in snap.rows], [r.value for r in plain.rows], rtol=1e-10)
    K = richter.kernels.ntk(model, X)
    assert K.dtype == torch.float64


def test_quantised_weights_beside_others(richter: ModuleType) -> None:
    """Dynamically quantised layers have no parameters, and a scale that they take from the whole batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantised = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(5, 6)), {nn.Linear})
        model, probe = nn.Sequential(quantised, nn.Tanh(), nn.Linear(6, 3)), richter.Probe(X.float(), Y)
        with refused("no parameters, so there is no layer to measure", model=quantised):
            richter.measure(quantised, probe)
        with refused("mixes examples", model=model):  # the scale of what is quantised is that of the whole batch
            richter.measure(model, probe)


# ------------------------------------------------------------------------------------------ layers that cannot be seen


def test_a_frozen_layer_is_measured_and_marked(richter: ModuleType) -> None:
    model = mlp()
    free = richter.measure(model, richter.Probe(X, Y), initial=STATE)
    model[2].requires_grad_(False)
    with undisturbed(model):
        snap = richter.measure(model, richter.Probe(X, Y), initial=STATE)
    for name in ("nfc", "cnfc", "c_uc_ratio", "weight_change"):
        assert snap.value(name, "2") == pytest.approx(free.value(name, "2"), rel=1e-12)
    assert re.search(r"frozen \(requires_grad=False\): it has no tangent kernel", snap.notes["2"])
    assert "frozen" in snap.frame.loc["2", "note"]
    assert math.isnan(snap.frame.loc["2", "tangent_cka"])
    assert "0" not in snap.notes
    assert snap.value("tangent_cka") != pytest.approx(free.value("tangent_cka"))  # the whole is that of the others
    model.requires_grad_(False)
    snap = richter.measure(model, richter.Probe(X, Y))
    assert snap.layers == ["0", "2", "4", "*"]
    assert {"nfc"} <= set(snap.measures)
    assert all("frozen" in snap.notes[layer] for layer in snap.layers[:-1])


class Spare(Two):
    """`spare` is never called."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.b(torch.tanh(m.a(x))))
        self.spare = nn.Linear(6, 6).double()


def test_a_layer_that_is_never_called(richter: ModuleType) -> None:
    model = Spare()
    with undisturbed(model):
        snap = richter.measure(model, richter.Probe(X, Y))
    assert snap.notes["spare"] == "never called on the probe"
    assert all(math.isnan(r.value) for r in snap.rows if r.layer == "spare")
    assert math.isfinite(snap.value("nfc", "a"))
    assert math.isfinite(snap.value("tangent_cka", "a"))


@pytest.mark.parametrize("measures", [None, ["nfc"], ["tangent_cka"]])
@pytest.mark.parametrize("layers", ["spare", ["a", "spare"]])
def test_a_layer_that_is_never_called_and_asked_for(richter: ModuleType, layers: Any, measures: Any) -> None:
    model = Spare()
    with refused("layer 'spare' cannot be measured: never called on the probe", model=model):
        richter.measure(model, richter.Probe(X, Y), measures, layers=layers)


def used_twice(m: Any, x: Tensor) -> Tensor:
    return m.b(torch.tanh(m.a(x))) + m.a.weight.tanh().sum()


SEEN = (r"layer 'a': 1 calls were seen, and they rebuild its weight gradient only up to a relative error of 0\.\d+",
        "not a linear map of one input", "Leave it out with layers=")  # fmt: skip


def test_a_weight_that_is_also_used_in_another_way(richter: ModuleType) -> None:
    """No number from half of its uses: a warning, a note, and everything that is right."""
    model, initial = Two(used_twice), Two(used_twice).state_dict()
    with undisturbed(model), pytest.warns(richter.RichterWarning) as caught:
        snap = richter.measure(model, richter.Probe(X, Y), initial=initial)
    for pattern in SEEN:
        assert re.search(pattern, str(caught[0].message))
        assert re.search(pattern, snap.notes["a"])
    rows = [r for r in snap.rows if r.layer == "a" and not r.measure.startswith("tangent")]
    assert all(math.isnan(r.value) for r in rows)
    assert math.isnan(snap.frame.loc["a", "nfc"])
    assert snap.value("nfc", "b") == pytest.approx(1.0)
    assert snap.note("nfc", "b").startswith("trivial")
    layers = richter.kernels.ntk(model, X, per_layer=True, form="full")  # whole gradients know every use
    J = torch.stack([torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(
        f, [model.a.weight, model.a.bias], retain_graph=True)]) for f in model(x[None])[0]]) for x in X])  # fmt: skip
    torch.testing.assert_close(layers["a"], torch.einsum("nvp,mwp->nvmw", J, J), rtol=1e-10, atol=1e-10)
    with refused("layer 'a' is not one of the linear maps of this model: b", model=model):
        richter.kernels.ptk(model, X, "a")


def test_a_weight_that_is_also_used_in_another_way_and_asked_for(richter: ModuleType) -> None:
    """Its tangent kernel is right, because that is made of whole gradients; its feature correlation does not exist."""
    model = Two(used_twice)
    with undisturbed(model), pytest.warns(richter.RichterWarning, match=SEEN[0]):
        snap = richter.measure(model, richter.Probe(X, Y), ["nfc", "tangent_cka"], layers="a")
    assert math.isfinite(snap.value("tangent_cka", "a"))
    assert [r.measure for r in snap.rows if math.isfinite(r.value)] == ["tangent_cka"]
    assert re.search(SEEN[0], snap.notes["a"])


class Kept(Two):
    """A weight is kept in a list beside the module that owns it."""

    def __init__(self, how: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(how)
        self.kept = [self.a.weight]


class Closed(Two):
    """A weight is kept in a closure."""

    def __init__(self) -> None:
        super().__init__(lambda m, x: m.b(torch.tanh(m.read(x))))
        weight = self.a.weight
        self.read = lambda x: x @ weight.T


@pytest.mark.parametrize("model", many(
    ("in a list", Kept(lambda m, x: m.b(torch.tanh(F.linear(x, m.kept[0]))))),
    ("in a closure", Closed()),
    ("in a list and in its module", Kept(lambda m, x: m.b(torch.tanh(m.a(x) + F.linear(x, m.kept[0]))))),
))  # fmt: skip
def test_a_parameter_reached_outside_the_module_tree(richter: ModuleType, model: nn.Module) -> None:
    sentences = ("parameter 'a.weight' reaches the output through a reference kept outside its module",
                 r"\(a list, a closure\)", r"Read it as an attribute in forward\(\)")  # fmt: skip
    with refused(*sentences, model=model):
        richter.measure(model, richter.Probe(X, Y))
    with refused(*sentences, model=model):
        richter.kernels.ntk(model, X)


@pytest.mark.parametrize("initial", [False, True])
def test_a_read_out_of_zeros(richter: ModuleType, initial: bool) -> None:
    """Nothing is asked of the layers before it: 0/0, said so, and no crash."""
    model = mlp()
    nn.init.zeros_(model[4].weight)
    options = {"initial": STATE} if initial else {}
    with undisturbed(model):
        snap = richter.measure(model, richter.Probe(X, Y), [*richter.measures.DEFAULT, "tangent_stable_rank",
                                                            "tangent_correlation"], **options)
    for layer in ("0", "2"):
        assert math.isnan(snap.value("c_uc_ratio", layer))
        for name in ("nfc", "tangent_alignment", "tangent_cka", "tangent_stable_rank", "tangent_correlation"):
            assert math.isnan(snap.value(name, layer))
            assert snap.note(name, layer).startswith("0/0: undefined here (a kernel, gradient or label of zeros)")
    assert math.isfinite(snap.value("tangent_cka", "4"))
    assert math.isfinite(snap.value("tangent_cka"))
    assert math.isfinite(snap.value("weight_change", "0")) == initial
    assert not richter.kernels.ntk(model, X, per_layer=True)["0"].any()


# ---------------------------------------------------------------------------------------------------- mixed examples


def normed(**options: Any) -> nn.Module:
    return initialised(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6, **options), nn.ReLU(), nn.Linear(6, 3)))


def in_pairs(z: Tensor) -> Tensor:
    """Each example takes the mean with its neighbour 2i <-> 2i+1."""
    if len(z) % 2:
        return torch.cat([in_pairs(z[:-1]), z[-1:]])
    return (z + z.reshape(-1, 2, z.shape[-1]).mean(1).repeat_interleave(2, 0)) / 2


MIXING = ("mixes examples", "so gradients of single examples do not exist", "Measure in eval mode")
MIXERS = many(
    ("batch norm without running statistics", lambda: normed(track_running_stats=False)),
    ("the input, before any layer", lambda: Before(lambda x: (x - x.mean(0)) / x.std(0))),
    ("attention across the batch", lambda: Two(lambda m, x: m.b(torch.softmax((z := m.a(x)) @ z.T, -1) @ z))),
    ("softmax over the batch", lambda: After(lambda z: torch.softmax(z, 0))),
    ("the example before", lambda: After(lambda z: z + torch.cat([z[:1] * 0, z[:-1]]))),
    ("the first example", lambda: After(lambda z: z - z[:1])),
    ("the running sum", lambda: After(lambda z: z.cumsum(0))),
    ("pairs of examples", lambda: After(in_pairs)),
    ("the largest example", lambda: After(lambda z: z / z.abs().max())),
    ("gradients alone", lambda: After(lambda z: z + (z.mean(0) - z.mean(0).detach()))),
)


@pytest.mark.parametrize("build", MIXERS)
def test_examples_that_are_mixed(richter: ModuleType, build: Callable[[], nn.Module]) -> None:
    model, x = build(), X * (1 + 9 * (torch.arange(N) == 3))[:, None]  # the largest example is in the middle
    with refused(*MIXING, model=model):
        richter.measure(model, richter.Probe(x, Y))
    with refused(MIXING[0], model=model):
        richter.kernels.ntk(model, x)


def test_batch_norm_mixes_in_train_mode_only(richter: ModuleType) -> None:
    model = normed()
    with refused(*MIXING, model=model):
        richter.measure(model, richter.Probe(X, Y), mode="train")
    with refused(MIXING[0], model=model):
        richter.kernels.ntk(model, X, mode="train")
    with undisturbed(model):
        assert math.isfinite(richter.measure(model, richter.Probe(X, Y)).value("nfc", "0"))


def test_dropout_does_not_hide_that_examples_are_mixed(richter: ModuleType) -> None:
    """In train mode outputs change from pass to pass anyway; that they also mix examples must be seen all the same."""

    def model(mixed: bool) -> nn.Module:
        model = Two(lambda m, x: m.b(m.dropout((z := torch.tanh(m.a(x))) - mixed * z.mean(0))))
        model.dropout = nn.Dropout(0.3)
        return model

    with undisturbed(alone := model(mixed=False)):
        assert math.isfinite(richter.measure(alone, richter.Probe(X, Y), mode="train").value("nfc", "a"))
    with refused(*MIXING, model=(together := model(mixed=True))):
        richter.measure(together, richter.Probe(X, Y), mode="train")


# ------------------------------------------------------------------------------------------- what is asked of a measure


@pytest.mark.parametrize(("layers", "sentence"), many(
    ("a name", "foo", r"layers='foo' matches nothing\. This model has: 0, 2, 4\. Patterns like"),
    ("one of two", ["0", "h.*.attn"], r"layers='h\.\*\.attn' matches nothing\. This model has: 0, 2, 4"),
    ("a layer without weights", ["1"], r"layers='1' matches nothing\. This model has: 0, 2, 4"),
    ("a function", lambda name: False, "layers= selects none of: 0, 2, 4"),
    ("an empty list", [], "layers=.*0, 2, 4"),
    ("a number", 0, "layers=0"),
    ("a list of numbers", [0], r"layers=\[?0"),
))  # fmt: skip
def test_layers_that_do_not_exist(richter: ModuleType, layers: Any, sentence: str) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, Y), layers=layers)


@pytest.mark.parametrize(("measures", "sentence"), many(
    ("a typing error", ["nfcc"], r"there is no measure 'nfcc'\. Did you mean nfc, cnfc\? Known measures: nfc, cnfc, "),
    ("a string", "tangent_alignmnt", r"no measure 'tangent_alignmnt'\. Did you mean tangent_alignment"),
    ("far from all", ["sharpness"], r"there is no measure 'sharpness'\. Known measures: nfc, .*tangent_cka"),
    ("a number in a list", [3], "measures= takes names or richter.measures.Measure objects, not int"),
    ("a number", 3, "measures= takes names or richter.measures.Measure objects, not int"),
    ("none at all", [], "measures= is empty: leave it out for the default set"),
))  # fmt: skip
def test_measures_that_do_not_exist(richter: ModuleType, measures: Any, sentence: str) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, Y), measures)
    with refused(sentence, model=model):
        richter.Observer(model, richter.Probe(X, Y), measures=measures)


def test_names_that_a_snapshot_does_not_have(richter: ModuleType) -> None:
    snap = richter.measure(mlp(), richter.Probe(X, Y), ["nfc", "tangent_cka"])
    with refused(r"this snapshot has no measure 'nfcc'\. Close to it: 'nfc'"):
        snap.value("nfcc", "0")
    with refused(r"this snapshot has no layer '9' for 'nfc'\. It has: '0', '2', '4'"):
        snap.value("nfc", "9")
    with refused(r"no layer '\*' for 'nfc'"):
        snap.value("nfc")


@pytest.mark.parametrize("mode", ["foo", None, "Train", True])
def test_modes_that_do_not_exist(richter: ModuleType, mode: Any) -> None:
    model, probe = mlp(), richter.Probe(X, Y)
    for ask in (
        lambda: richter.measure(model, probe, mode=mode),
        lambda: richter.Observer(model, probe, mode=mode)(0),
        lambda: richter.kernels.ntk(model, X, mode=mode),
        lambda: richter.kernels.ptk(model, X, "0", mode=mode),
    ):
        with refused(rf"mode={mode!r}: choose 'eval' \(default\) or 'train'", model=model):
            ask()


@pytest.mark.parametrize("memory", ["abc", "2XB", "", "-1", "1.2.3GB", ".", None, True, [1]])
def test_sizes_that_are_none(richter: ModuleType, memory: Any) -> None:
    model = mlp()
    with refused(re.escape(f"memory={memory!r} is not a size. Write a number of bytes, or e.g. '500MB'"), model=model):
        richter.measure(model, richter.Probe(X, Y), memory=memory)
    with refused(re.escape(f"memory={memory!r} is not a size."), model=model):
        richter.kernels.ntk(model, X, memory=memory)


@pytest.mark.parametrize("memory", ["0", 0, -5, NAN, INF, "0.0GiB"])
def test_sizes_that_are_not_positive(richter: ModuleType, memory: Any) -> None:
    model = mlp()
    with refused(re.escape(f"memory={memory!r} must be positive and finite"), model=model):
        richter.measure(model, richter.Probe(X, Y), memory=memory)


def convolutional() -> nn.Module:
    """Positions, groups and norms make other terms of the memory count the largest."""
    return initialised(nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 6, 2, groups=2),
                                     nn.Flatten(), nn.Linear(6 * 9, 3)))  # fmt: skip


SETS = {"moments": ["nfc", "cnfc"], "initial network": ["nfc", *EXTRA], "kernels": ["tangent_cka"], "default": None}


@pytest.mark.parametrize("measures", SETS)
@pytest.mark.parametrize("build", [mlp, convolutional])
def test_the_smallest_memory_is_stated_and_works(
    richter: ModuleType, build: Callable[[], nn.Module], measures: str
) -> None:
    model, x = build(), X[:6] if build is mlp else normal(6, 1, 6, 6)
    probe = richter.Probe(x, Y[:6])
    options = {"measures": SETS[measures], "initial": {k: v + 1 for k, v in build().state_dict().items()}}
    plenty = richter.measure(model, probe, **options)
    with refused("memory=16B cannot hold", "fewer layers.* need less", model=model):
        richter.measure(model, probe, memory=16, **options)
    with pytest.raises(richter.core.MemoryBudgetError) as caught:
        richter.measure(model, probe, memory=16, **options)
    (least,) = re.findall(r"The smallest that works here is memory='([^']+)'", str(caught.value))
    with undisturbed(model):
        frugal = richter.measure(model, probe, memory=least, **options)
    np.testing.assert_allclose([r.value for r in frugal.rows], [r.value for r in plenty.rows], rtol=1e-10, atol=1e-14)
    with pytest.raises(richter.core.MemoryBudgetError):  # and it is the smallest, up to the digits shown
        richter.measure(model, probe, memory=0.98 * richter.core.parse_bytes(least), **options)


@pytest.mark.parametrize("outputs", ["trace", "diagonal", "full"])
def test_the_smallest_memory_of_a_kernel_is_stated_and_works(richter: ModuleType, outputs: str) -> None:
    model = mlp()
    with refused("memory=10B cannot hold one pair of examples of 3 layers", "fewer examples", model=model):
        richter.kernels.ntk(model, X, form=outputs, memory=10)
    with pytest.raises(richter.core.MemoryBudgetError) as caught:
        richter.kernels.ntk(model, X, form=outputs, memory=10)
    (least,) = re.findall(r"The smallest that works here is memory='([^']+)'", str(caught.value))
    frugal = richter.kernels.ntk(model, X, form=outputs, memory=least)
    torch.testing.assert_close(frugal, richter.kernels.ntk(model, X, form=outputs), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize(("initial", "sentence"), many(
    ("a missing key", {k: v for k, v in STATE.items() if k != "2.weight"},
     r"initial= has no entry '2\.weight'\. Pass a state_dict of this very model, taken before training"),
    ("nothing in it", {}, r"initial= has no entry '0\.weight'"),
    ("another shape", {**STATE, "2.weight": torch.zeros(2, 2)},
     r"initial\['2\.weight'\] has shape \(2, 2\), the model's is \(4, 6\): it is the state of another architecture"),
    ("nan", {**STATE, "2.bias": torch.full((4,), NAN)}, r"initial\['2\.bias'\] contains NaN or Inf"),
    ("inf", {**STATE, "4.weight": torch.full((3, 4), INF)}, r"initial\['4\.weight'\] contains NaN or Inf"),
    ("not a tensor", {**STATE, "2.weight": 3.0}, r"initial\['2\.weight'\] is a float"),
    ("a model", mlp(seed=1), "initial= is a Sequential.*state_dict"),
    ("a list", list(STATE.values()), "initial= is a list.*state_dict"),
))  # fmt: skip
def test_initial_weights_that_do_not_fit(richter: ModuleType, initial: Any, sentence: str) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, Y), initial=initial)
    with refused(sentence, model=model):
        richter.Observer(model, richter.Probe(X, Y), initial=initial)


@pytest.mark.parametrize(("value", "sentence"), many(
    ("nan", torch.full((6,), NAN), r"initial\['1\.running_mean'\] contains NaN or Inf"),
    ("another shape", torch.zeros(4), r"initial\['1\.running_mean'\] has shape \(4,\)"),
))  # fmt: skip
def test_initial_buffers_that_do_not_fit(richter: ModuleType, value: Tensor, sentence: str) -> None:
    model, state = normed(), normed().state_dict()
    with refused(sentence, model=model):
        richter.measure(model, richter.Probe(X, Y), EXTRA, initial={**state, "1.running_mean": value.double()})


def test_an_initial_network_whose_output_is_not_finite(richter: ModuleType) -> None:
    """Finite weights whose products are not: that is no 0/0 of weights that have not moved."""
    model = initialised(nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)))
    initial = {k: v * 1e200 for k, v in model.state_dict().items()}
    with refused("initial.*NaN or Inf", model=model):
        richter.measure(model, richter.Probe(X, Y), EXTRA, initial=initial)


@pytest.mark.parametrize(("options", "sentence"), many(
    ("no budget", {"budget": 0}, r"budget=0: a share of wall time in \(0, 1\], or None for no limit"),
    ("a negative budget", {"budget": -0.5}, r"budget=-0.5: a share of wall time in \(0, 1\]"),
    ("more than all", {"budget": 1.5}, r"budget=1.5: a share of wall time in \(0, 1\]"),
    ("nan", {"budget": NAN}, r"budget=nan: a share of wall time"),
    ("a word for a budget", {"budget": "a"}, r"budget='?a'?: a share of wall time"),
    ("never", {"when": 0}, "when=0: a positive number of steps is needed"),
    ("negative", {"when": -1}, "when=-1: a positive number of steps is needed"),
    ("a fraction", {"when": 1.5}, "when=1.5"),
    ("a word", {"when": "a"}, "when='a'"),
    ("a list of words", {"when": ["a"]}, "when=.*'a'.*: .*a list of steps"),
))  # fmt: skip
def test_options_of_an_observer(richter: ModuleType, options: dict[str, Any], sentence: str) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.Observer(model, richter.Probe(X, Y), **options)


def test_whole_numbers_of_numpy_are_whole_numbers(richter: ModuleType) -> None:
    probe = richter.Probe(X, Y, chunk=np.int64(5))
    watch = richter.Observer(mlp(), probe, when=np.int64(5), measures="nfc", budget=None)
    assert [watch(step) is not None for step in range(7)] == [True, False, False, False, False, True, False]


@pytest.mark.parametrize(("make", "sentence"), many(
    ("every", lambda r: r.every(0), "when=0: a positive number of steps"),
    ("epochs of nothing", lambda r: r.epochs([]), r"epochs\(\[\], 1\): a positive number of steps"),
    ("up to nothing", lambda r: r.log_spaced(0), r"log_spaced\(0, 20\): a last step and at least two points"),
    ("one point", lambda r: r.log_spaced(9, 1), r"log_spaced\(9, 1\): a last step and at least two points"),
    ("a loader of nothing", lambda r: r.Probe.from_loader([]), "the loader gave no batch: the probe would be empty"),
    ("one from a loader", lambda r: r.Probe.from_loader([(X, Y)], n=1), r"from_loader\(n=1\).*at least two"),
    ("no random output", lambda r: r.instrument.cotangents.random_outputs(0), r"random_outputs\(0\): at least one random output"),
))  # fmt: skip
def test_schedules_and_loaders(richter: ModuleType, make: Callable[[Any], Any], sentence: str) -> None:
    with refused(sentence):
        make(richter)


# ------------------------------------------------------------------------------------------------------------ kernels


@pytest.mark.parametrize("outputs", ["foo", None, 3])
def test_kernels_of_outputs_that_do_not_exist(richter: ModuleType, outputs: Any) -> None:
    model = mlp()
    with refused(rf"form={outputs!r}: choose one of trace, diagonal, full", model=model):
        richter.kernels.ntk(model, X, form=outputs)


@pytest.mark.parametrize(("x", "sentence"), many(
    ("no example", X[:0], "x holds no example"),
    ("numpy", X[:0].numpy(), "x holds no example"),
    ("an empty tuple", (), "holds no example|with the examples first; not tuple"),
    ("nothing", None, "with the examples first; not NoneType"),
    ("words", "abc", "with the examples first; not str"),
    ("nan", changed(X, (1, 0), NAN), "contains NaN or Inf"),
    ("nan far behind", changed(X, (N - 1, 0), NAN), "contains NaN or Inf"),
    ("lengths", {"a": X, "b": X[:5]}, r"different numbers of examples \(\[5, 12\]\)"),
))  # fmt: skip
def test_inputs_of_kernels(richter: ModuleType, x: Any, sentence: str) -> None:
    model = mlp()
    for ask in (
        lambda: richter.kernels.ntk(model, x),
        lambda: richter.kernels.ptk(model, x, "0"),
        lambda: richter.kernels.forward_kernel(model, x, "0"),
        lambda: richter.kernels.backward_kernel(model, x, "0"),
    ):
        with refused(sentence, model=model):
            ask()


@pytest.mark.parametrize(("x2", "sentence"), many(
    ("no example", X[:0], "holds no example"),
    ("nan", changed(X, (1, 0), NAN), "contains NaN or Inf"),
))  # fmt: skip
def test_second_inputs_of_kernels(richter: ModuleType, x2: Any, sentence: str) -> None:
    model = mlp()
    with refused(sentence, model=model):
        richter.kernels.ntk(model, X, x2)


def test_kernels_of_nothing_that_is_trained(richter: ModuleType) -> None:
    model = mlp().requires_grad_(False)
    with refused("no trainable parameter, so its tangent kernel is empty", "Set requires_grad=True", model=model):
        richter.kernels.ntk(model, X)
    assert richter.kernels.ptk(model, X, "0").shape == (N, N)  # what the outputs ask of it needs no training


@pytest.mark.parametrize("function", ["ptk", "forward_kernel", "backward_kernel"])
@pytest.mark.parametrize("layer", ["foo", "1", 0, None])
def test_kernels_of_layers_that_do_not_exist(richter: ModuleType, function: str, layer: Any) -> None:
    model = mlp()
    with refused(rf"layer {layer!r} is not one of the linear maps of this model: 0, 2, 4", model=model):
        getattr(richter.kernels, function)(model, X, layer)


K, LABELS = torch.eye(4, dtype=torch.float64), normal(4)


@pytest.mark.parametrize(("name", "given", "sentence"), many(
    ("alignment oblong", "alignment", (normal(3, 4), LABELS), r"K has shape \(3, 4\); give a square kernel matrix \[n, n\]"),
    ("alignment empty", "alignment", (K[:0, :0], LABELS[:0]), r"K has shape \(0, 0\); give a square kernel matrix"),
    ("alignment stacked", "alignment", (K[None], LABELS), r"K has shape \(1, 4, 4\); give a square kernel matrix"),
    ("alignment nan", "alignment", (K * NAN, LABELS), "K contains NaN or Inf"),
    ("alignment nan labels", "alignment", (K, LABELS * NAN), "y contains NaN or Inf"),
    ("alignment too few labels", "alignment", (K, LABELS[:3]), r"y has shape \(3, 1\) for a kernel of 4 examples"),
    ("alignment axes", "alignment", (K, normal(4, 2, 2)), r"y has shape \(4, 2, 2\) for a kernel of 4.*\[n\] or"),
    ("alignment complex", "alignment", (K + 1j, LABELS), "complex"),
    ("cka oblong", "cka", (normal(3, 4), K), r"K has shape \(3, 4\)"),
    ("cka oblong second", "cka", (K, normal(3, 4)), r"L has shape \(3, 4\)"),
    ("cka sizes", "cka", (K, K[:3, :3]), "kernels of 4 and 3 examples cannot be compared"),
    ("cka nan", "cka", (K * NAN, K), "K contains NaN or Inf"),
    ("cka inf second", "cka", (K, changed(K, (0, 1), INF)), "L contains NaN or Inf"),
    ("cka words", "cka", (K, "kernel"), "L is a str that cannot be read as numbers"),
    ("stable_rank oblong", "stable_rank", (normal(3, 4),), r"K has shape \(3, 4\)"),
    ("stable_rank vector", "stable_rank", (LABELS,), r"K has shape \(4,\)"),
    ("stable_rank nan", "stable_rank", (K * NAN,), "K contains NaN or Inf"),
    ("power_law few", "power_law", (torch.ones(3),), "needs two positive values among ranks 5 to 1; 0 found"),
    ("power_law negative", "power_law", (-torch.ones(30),), "two positive values among ranks 5 to 18; 0 found"),
    ("power_law none", "power_law", (torch.zeros(0),), "two positive values"),
    ("power_law nan", "power_law", (torch.tensor([1.0, NAN] * 20),), "contains NaN or Inf"),
    ("power_law inf", "power_law", (torch.tensor([INF, 1.0] * 20),), "contains NaN or Inf"),
    ("specialisation flat", "specialisation", (K, K), r"kernels \(4, 4\) and labels \(4, 4\): give \[k, n, n\]"),
    ("specialisation sizes", "specialisation", (K.expand(2, 4, 4), normal(3, 2)), r"\(2, 4, 4\) and labels \(3, 2\)"),
    ("specialisation oblong", "specialisation", (normal(2, 4, 3), normal(4, 2)), r"\(2, 4, 3\) and labels \(4, 2\)"),
    ("specialisation nan", "specialisation", (K.expand(2, 4, 4) * NAN, normal(4, 2)), "contains NaN or Inf"),
    ("specialisation nan labels", "specialisation", (K.expand(2, 4, 4), normal(4, 2) * NAN), "contains NaN or Inf"),
))  # fmt: skip
@pytest.mark.parametrize("kind", ["torch", "numpy"])
def test_matrices_that_are_no_kernels(
    richter: ModuleType, name: str, given: tuple[Any, ...], sentence: str, kind: str
) -> None:
    if kind == "numpy":
        given = tuple(a.numpy() if isinstance(a, Tensor) else a for a in given)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with refused(sentence):
            getattr(richter.kernels, name)(*given)


class Sometimes(nn.Module):
    """Writes into its weight when an input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        if (x[:, 0] > 50).any():
            with torch.no_grad():
                self.a.weight.mul_(0.5)
        return self.a(x)


def test_a_weight_written_on_some_inputs_only_is_told(richter: ModuleType) -> None:
    """It cannot be foreseen from the first examples; it is at least not silent."""
    x = X.clone()
    x[N - 1, 0] = 99.0
    with pytest.raises(richter.RichterError, match=r"wrote into parameter 'a.weight' on some inputs"):
        richter.measure(Sometimes().double(), richter.Probe(x, Y), ["nfc"])


def test_more_outputs_than_memory_holds_labels_for(richter: ModuleType) -> None:
    """A vocabulary times a text: refused before an array of that size is made."""
    model = initialised(nn.Sequential(nn.Linear(5, 1_000_000)))
    with refused("cannot hold the labels of 1,000,000 outputs for 12 examples.*pick fewer outputs", model=model):
        richter.measure(model, richter.Probe(X, Y), ["nfc"], memory="50MB")


# ---------------------------------------------------------------------------------------------- inputs that the model cannot read

@pytest.mark.parametrize(("model", "x", "words"), [
    (nn.Linear(4, 3), torch.randn(20, 7),
     r"\(Linear, weights of float32\) cannot read its inputs: given x \[n, 7\] of float32, model\(x\) raised RuntimeError"),
    (nn.Linear(4, 3), torch.randn(20, 4).double(),
     r"given x \[n, 4\] of float64, .* of the same shape and dtype, examples first"),
    (nn.Linear(4, 3), torch.ones(20, 4, dtype=torch.uint8), r"given x \[n, 4\] of uint8"),
    (nn.Embedding(10, 3), torch.randn(20, 2), r"given x \[n, 2\] of float32"),
    (nn.Embedding(10, 3), torch.full((20, 2), 50), r"given x \[n, 2\] of int64, .* IndexError: index out of range"),
    (nn.Linear(4, 3), {"x": torch.randn(20, 4)}, r"model\(\*\*x\) raised TypeError"),
    (nn.Linear(4, 3), (torch.randn(20, 4), torch.randn(20, 2)),
     r"x\[0\] \[n, 4\] of float32, x\[1\] \[n, 2\] of float32, model\(\*x\) raised TypeError")],
    ids=["shape", "double", "bytes", "floats as ids", "ids too large", "a dict", "a tuple"])
def test_inputs_that_the_model_cannot_read(richter: ModuleType, model: nn.Module, x: Any, words: str) -> None:
    probe = richter.Probe(x, torch.arange(20) % 3)
    for work in (richter.measure, richter.plan, lambda *given: richter.Observer(*given)(0)):
        with pytest.raises(richter.core.ProbeError, match=words):
            work(model, probe)
