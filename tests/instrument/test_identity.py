"""Training with and without an Observer is bit-identical: weights, buffers, gradients, optimiser, random streams,
modes, hooks and global switches, wherever in the loop it is called and whatever goes wrong while it measures.

Every setting is trained twice from the same seeds, once alone and once observed, and compared bit by bit at the end.
Beside that, everything is compared just before and just after each single measurement, by identity as well as by value.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pkgutil
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.data import DataLoader, TensorDataset

import richter
import richter.instrument.observe
from richter.core import CaptureError, MixingError
from richter.instrument.subject import Subject
from zoo import CASES, Case, call

STEPS = 200
LOOKS = 4  # calls of the Observer in one training step
WHEN = 97  # calls between two measurements; no multiple of LOOKS, so that every place in the loop gets its turn
FEW = ("nfc", "double_centred_nfc", "tangent_cka")  # features, those of the initial network too, and kernels: quick
HOOKS = sorted(name for name in vars(nn.Module()) if "hooks" in name)

Look = Callable[[], None]
Fingerprint = dict[str, Any]


@pytest.fixture(autouse=True)
def own_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """beartype draws the list items it checks from Python's global stream. Here the functions of `random` belong to
    another stream, which only training (and Richter, if it does) draws from."""
    fresh = random.Random(0)
    for name in random.__all__:
        if getattr(getattr(random, name), "__self__", None) is not None:
            monkeypatch.setattr(random, name, getattr(fresh, name))


@pytest.fixture(autouse=True)
def repeatable(request: pytest.FixtureRequest) -> Iterator[None]:
    """On a GPU only what torch itself repeats bit by bit can be compared."""
    on_gpu = "device" in request.fixturenames and request.getfixturevalue("device") == "cuda"
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        if on_gpu:
            warnings.simplefilter("ignore")
            torch.use_deterministic_algorithms(True, warn_only=True)
        yield
    torch.use_deterministic_algorithms(before)


# ------------------------------------------------------------------------------------------------- what is compared


def leaves(found: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The tensors and numbers inside nested dicts and lists, each with its path."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield from leaves(value, f"{path} {key}")
    elif isinstance(found, (list, tuple)):
        for i, value in enumerate(found):
            yield from leaves(value, f"{path} {i}")
    else:
        yield path, found.detach().clone() if isinstance(found, Tensor) else found


def streams() -> Fingerprint:
    """The states of all random streams."""
    _, keys, *rest = np.random.get_state()  # noqa: NPY002  the global stream is what may not move
    found = {"torch": torch.get_rng_state(), "numpy": (keys.tobytes(), *rest), "python": repr(random.getstate())}
    if torch.cuda.is_available():
        found["cuda"] = torch.stack(torch.cuda.get_rng_state_all())
    return found


def switches() -> Fingerprint:
    """Global state of torch that a measurement must borrow."""
    return {
        "grad mode": torch.is_grad_enabled(), "inference mode": torch.is_inference_mode_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")], "dtype": torch.get_default_dtype(),
        "anomaly": torch.is_anomaly_enabled(), "stance": torch._dynamo.eval_frame._stance,
        "function modes": len(torch.overrides._get_current_function_mode_stack()),
        "parametrize": (parametrize._cache_enabled, sorted(parametrize._cache)),
        "checkpoint": {k: id(v) for k, v in vars(torch.utils.checkpoint).items() if callable(v)},
    }  # fmt: skip


def fingerprint(model: nn.Module, optimiser: torch.optim.Optimizer) -> Fingerprint:
    """Everything that two runs from the same seeds have in common."""
    found: Fingerprint = {"streams": streams(), "optimiser": optimiser.state_dict()}
    for name, module in model.named_modules():
        found[f"module {name}"] = {"training": module.training, "class": type(module).__name__,
                                   **{hooks: len(getattr(module, hooks)) for hooks in HOOKS}}  # fmt: skip
    for name, p in model.named_parameters():
        found[f"parameter {name}"] = {
            "value": p, "grad": p.grad, "requires_grad": p.requires_grad, "hooks": len(p._backward_hooks or ()),
            "accumulated": len(p._post_accumulate_grad_hooks or ())}  # fmt: skip
    found |= {f"buffer {name}": b for name, b in model.named_buffers()}
    return dict(leaves(found))


def objects(model: nn.Module) -> dict[str, Any]:
    """What must be the very same object, not only an equal one, before and after a measurement; and its version, which
    torch raises with every write in place."""
    found: dict[str, Any] = {}
    for name, p in model.named_parameters():
        found |= {f"{name}": p, f"{name} version": p._version, f"{name} grad": p.grad, f"{name} data": p.data_ptr()}
        found[f"{name} grad version"] = None if p.grad is None else p.grad._version
    for name, b in model.named_buffers():
        found |= {f"{name}": b, f"{name} version": b._version}
    for name, module in model.named_modules():
        found[f"{name} is"] = type(module)
        for hooks in HOOKS:
            found |= {f"{name} {hooks} {key} {i}": hook for i, (key, hook) in enumerate(getattr(module, hooks).items())}
        for key, value in vars(module).items():
            if isinstance(value, (Tensor, int, float, str)) and key != "training":
                found[f"{name} attribute {key}"] = value
    return found


def assert_same(expected: Fingerprint, found: Fingerprint) -> None:
    assert expected.keys() == found.keys(), expected.keys() ^ found.keys()
    different = []
    for key, a in expected.items():
        b = found[key]
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            same = a.dtype == b.dtype and torch.equal(a, b)
        else:
            same = type(a) is type(b) and a == b
        if not same:
            different.append(key)
    assert not different, different


@contextlib.contextmanager
def undisturbed(model: nn.Module, optimiser: torch.optim.Optimizer) -> Iterator[None]:
    """Nothing is another object or another value when the block ends, however it ends."""
    before, held, around = fingerprint(model, optimiser), objects(model), dict(leaves(switches()))
    try:
        yield
    finally:
        now = objects(model)
        assert held.keys() == now.keys(), held.keys() ^ now.keys()
        moved = [k for k in held if held[k] is not now[k] and not (isinstance(held[k], int) and held[k] == now[k])]
        assert not moved, moved
        assert_same(around, dict(leaves(switches())))
        assert_same(before, fingerprint(model, optimiser))


# ------------------------------------------------------------------------------------------------- training, twice


def batch(kind: str, n: int, device: str) -> tuple[Any, Tensor]:
    """Inputs and labels that depend on all three global random streams, and on that of the device."""
    y = torch.tensor([(random.randrange(3) + np.random.randint(3)) % 3 for _ in range(n)])  # noqa: NPY002
    shape = {"vector": (5,), "image": (2, 4, 4), "sequence": (3, 4)}.get(kind)
    if shape is None:
        return torch.randint(0, 7, (n, 4), device=device), y.to(device)
    return torch.randn(n, *shape, device=device) + 0.1 * torch.randn(n, *[1] * len(shape)).to(device), y.to(device)


def probe_of(kind: str, **options: Any) -> richter.Probe:
    draw = torch.Generator().manual_seed(7)
    shape = {"vector": (5,), "image": (2, 4, 4), "sequence": (3, 4)}.get(kind)
    n = 6  # few, to be quick
    x = torch.randint(0, 7, (n, 4), generator=draw) if shape is None else torch.randn(n, *shape, generator=draw)
    return richter.Probe(x, torch.arange(n) % 3, **{"kernel_examples": 3, **options})


def plain(model: nn.Module, optimiser: torch.optim.Optimizer, draw: Any, look: Look) -> None:
    """One step, looked at before the forward, before the backward, before the step and after it."""
    optimiser.zero_grad()
    x, y = draw()
    look()
    loss = F.cross_entropy(model(x), y)
    look()
    loss.backward()
    look()
    optimiser.step()
    look()


def mixed_precision(model: nn.Module, optimiser: torch.optim.Optimizer, draw: Any, look: Look) -> None:
    """The forward in bfloat16, looked at inside autocast and outside."""
    optimiser.zero_grad()
    x, y = draw()
    with torch.autocast(x.device.type, torch.bfloat16):
        look()
        f = model(x)
        look()
        again = model(x)  # with weights that autocast keeps in a cache
        loss = F.cross_entropy(f.float(), y) + again.float().square().mean()
    look()
    loss.backward()
    look()
    optimiser.step()


def accumulation(model: nn.Module, optimiser: torch.optim.Optimizer, draw: Any, look: Look) -> None:
    """Gradients of three small batches are added up, and looked at in between."""
    for _ in range(3):
        x, y = draw()
        (F.cross_entropy(model(x), y) / 3).backward()
        look()
    optimiser.step()
    look()
    optimiser.zero_grad()
    x, y = draw()
    F.cross_entropy(model(x), y).backward()  # left over for the next step


def cached_parametrisations(model: nn.Module, optimiser: torch.optim.Optimizer, draw: Any, look: Look) -> None:
    """Parametrised weights are computed once for two forward passes."""
    optimiser.zero_grad()
    with parametrize.cached():
        look()
        x, y = draw()
        loss = F.cross_entropy(model(x), y)
        look()
        (loss + model(x).square().mean()).backward()
        look()
    optimiser.step()
    look()


@dataclass(frozen=True)
class Setting:
    """A model and the way it is trained."""

    build: Callable[[], nn.Module]
    kind: str = "vector"
    step: Callable[..., None] = plain
    steps: int = 40
    options: dict[str, Any] = field(default_factory=dict)  # of the Observer
    measured: str | None = "tangent_cka"  # this one is a number for the whole model


class Watching:
    """An Observer called again and again; each measurement is seen to leave everything as it was."""

    def __init__(self, model: nn.Module, optimiser: torch.optim.Optimizer, probe: richter.Probe,
                 **options: Any) -> None:
        self.model, self.optimiser, self.calls = model, optimiser, 0
        with undisturbed(model, optimiser):
            self.watch = richter.Observer(model, probe, **{"budget": None, "when": WHEN, "measures": FEW, "on_error": "raise",
                                                              **options})

    def __call__(self) -> None:
        step, self.calls = self.calls, self.calls + 1
        if step and not self.watch.when(step):
            assert self.watch(step) is None
            return
        with undisturbed(self.model, self.optimiser):
            assert self.watch(step) is not None


def seed() -> None:
    torch.manual_seed(11)
    np.random.seed(12)  # noqa: NPY002
    random.seed(13)


def optimisers(model: nn.Module, name: str) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(model.parameters(), lr=3e-3)
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-3)


def train(setting: Setting, device: str, optimiser: str = "adam", observed: bool = True,
          **options: Any) -> tuple[Fingerprint, Watching | None]:
    """Train from fixed seeds; the fingerprint at the end, and what was watched."""
    seed()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = setting.build().to(device).train()
    chosen = optimisers(model, optimiser)
    before = streams()
    watching = Watching(model, chosen, probe_of(setting.kind), **setting.options, **options) if observed else None
    assert_same(dict(leaves(before)), dict(leaves(streams())))
    for _ in range(setting.steps):
        setting.step(model, chosen, lambda: batch(setting.kind, 8, device), watching or (lambda: None))
    return fingerprint(model, chosen), watching


def check(setting: Setting, device: str, optimiser: str = "adam", **options: Any) -> Watching:
    """Train alone and observed; the same in every bit, and the observer did see something."""
    alone, _ = train(setting, device, optimiser, observed=False)
    observed, watching = train(setting, device, optimiser, **options)
    assert_same(alone, observed)
    assert watching is not None
    due = [0, *(i for i in range(1, LOOKS * setting.steps) if watching.watch.when(i))]
    assert [s.step for s in watching.watch.snapshots] == due
    assert len(due) > 1
    if setting.measured is not None:
        values = watching.watch.series(setting.measured).value
        assert all(map(math.isfinite, values))
        assert len(set(values)) > 1  # the model did move, and was seen to
    return watching


# ------------------------------------------------------------------------------------------------------- the models


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def dropout_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3))


def batch_norm_cnn() -> nn.Module:
    """Batch norm and dropout, of images and of vectors."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout2d(0.2),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8), nn.BatchNorm1d(8, momentum=None), nn.ReLU(), nn.Dropout(0.3),
        nn.Linear(8, 3))  # fmt: skip


class Words(nn.Module):
    """A bag of words whose embedding is rescaled, in place, by every look-up."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "function":
            self.table = nn.Parameter(torch.randn(7, 5))
        else:
            self.table = (nn.Embedding if how == "module" else nn.EmbeddingBag)(7, 5, max_norm=0.7)
        self.readout = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, ids: Tensor) -> Tensor:
        if self.how == "bag":
            return self.readout(self.table(ids))
        found = self.table(ids) if self.how == "module" else F.embedding(ids, self.table, max_norm=0.7)
        return self.readout(found.mean(1))


class Normalised(nn.Module):
    """Its forward writes a unit-norm weight back into the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.readout = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.copy_(F.normalize(self.first.weight, dim=1))
        return self.readout(torch.tanh(self.first(x)))


class InPlaceInput(nn.Module):
    """Its forward writes into what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.readout = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x -= 0.1
        return self.readout(torch.tanh(self.first(x.mul_(2.0))))


class Drawing(nn.Module):
    """Its forward draws from all three streams, in either mode, and uses what it drew while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        noise = np.random.rand() + random.random() + torch.rand(1).item()  # noqa: NPY002
        return self.body(x) + (0.1 * noise if self.training else 0.0)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, dropout=0.2, batch_first=True)
        self.readout = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(x)[0][:, -1])


class Checkpointed(nn.Module):
    """Blocks with dropout, recomputed in the backward pass in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.readout = nn.Linear(5, 6), nn.Linear(6, 3)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(8, 6))
        self.second = nn.Sequential(nn.Linear(6, 7), nn.Dropout(0.2), nn.Tanh(), nn.Linear(7, 6))

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        z = z + torch.utils.checkpoint.checkpoint(self.first, z, use_reentrant=False)
        return self.readout(torch.tanh(z + torch.utils.checkpoint.checkpoint(self.second, z, use_reentrant=True)))


def new_norms() -> nn.Module:
    """In train mode every forward is a step of the power iteration, kept in buffers."""
    p = parametrizations
    return nn.Sequential(p.spectral_norm(nn.Linear(5, 8)), nn.Tanh(), p.weight_norm(nn.Linear(8, 6)), nn.Tanh(),
                         p.orthogonal(nn.Linear(6, 6)), nn.Linear(6, 3))  # fmt: skip


def old_norms() -> nn.Module:
    """`weight` is a plain attribute, computed anew before each forward."""
    u = torch.nn.utils
    return nn.Sequential(u.weight_norm(nn.Linear(5, 8)), nn.Tanh(), u.spectral_norm(nn.Linear(8, 6)), nn.Tanh(),
                         nn.Linear(6, 3))  # fmt: skip


def frozen() -> nn.Module:
    model = batch_norm_cnn()
    model[0].requires_grad_(False)
    return model


SETTINGS = {
    "mixed precision": Setting(batch_norm_cnn, "image", mixed_precision),
    "accumulation": Setting(batch_norm_cnn, "image", accumulation),
    "frozen layer": Setting(frozen, "image"),
    "max_norm embedding": Setting(lambda: Words("module"), "tokens"),
    "max_norm embedding bag": Setting(lambda: Words("bag"), "tokens"),
    "max_norm as a function": Setting(lambda: Words("function"), "tokens"),
    "weight written in forward": Setting(Normalised),
    "parametrisations": Setting(new_norms),
    "cached parametrisations": Setting(new_norms, step=cached_parametrisations),
    "old norms": Setting(old_norms),
    "a forward that draws": Setting(Drawing),
    "lstm": Setting(Recurrent, "sequence"),
    "checkpoints": Setting(Checkpointed),
    "kept in train mode": Setting(dropout_mlp, options={"mode": "train"}),
    "power iterations in train mode": Setting(new_norms, options={"mode": "train"}, measured=None),
}


@pytest.mark.parametrize("optimiser", ["adam", "sgd"])
@pytest.mark.parametrize("setting", [Setting(mlp, steps=STEPS), Setting(batch_norm_cnn, "image", steps=STEPS)],
                         ids=["mlp", "batch norm and dropout"])
def test_two_hundred_steps(setting: Setting, optimiser: str, device: str) -> None:
    """With the default measures."""
    check(setting, device, optimiser, measures=None)


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str, device: str) -> None:
    check(SETTINGS[name], device)


@pytest.mark.parametrize("when", [50, [3, 4, 90], lambda step: step in (1, 2, 30), richter.log_spaced(199, 6),
                                  richter.epochs(40), richter.epochs([None] * 25, 2)],
                         ids=["every", "list", "callable", "log_spaced", "epochs", "epochs of a loader"])
def test_schedules(when: Any, device: str) -> None:
    check(Setting(batch_norm_cnn, "image", steps=50), device, "sgd", when=when)


def test_every_measure(device: str) -> None:
    """Also those that run the initial network a second time."""
    check(Setting(batch_norm_cnn, "image", steps=20), device, when=37, measures=list(richter.measures.catalogue()))


@pytest.mark.parametrize("name", CASES)
def test_every_model_of_the_zoo(name: str, device: str) -> None:
    """Three steps of every kind of model, in train mode, the second one seen between backward and step."""
    case = CASES[name]
    assert_same(zoo_training(case, device, observed=False), zoo_training(case, device, observed=True))


def zoo_training(case: Case, device: str, observed: bool) -> Fingerprint:
    seed()
    model = case.build().to(device).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    x, y = case.batch(6)
    watch = richter.Observer(model, richter.Probe(x, y, kernel_examples=4), measures=FEW, output=case.output)
    x = torch.utils._pytree.tree_map(lambda t: t.to(device), x)
    for step in range(3):
        optimiser.zero_grad()
        out = call(model, x)
        (out if case.output is None else case.output(out)).square().mean().backward()
        if observed and step == 1:
            with undisturbed(model, optimiser):
                assert watch(step) is not None
        optimiser.step()
    return fingerprint(model, optimiser)


# --------------------------------------------------------------------------------------------------- data and modes


def test_a_shuffling_loader_draws_the_same_batches(device: str) -> None:
    """A DataLoader takes its order from the global stream at the start of every epoch."""

    def run(observed: bool) -> tuple[Fingerprint, list[Tensor]]:
        seed()
        data = TensorDataset(torch.randn(40, 5), torch.arange(40) % 3)
        model = dropout_mlp().to(device).train()
        optimiser, step, order = optimisers(model, "sgd"), 0, []
        loader = DataLoader(data, batch_size=8, shuffle=True)
        probe = richter.Probe.from_loader(loader, n=12) if observed else None
        watching = Watching(model, optimiser, probe, when=15) if probe is not None else None
        for _ in range(20):
            for x, y in loader:
                optimiser.zero_grad()
                F.cross_entropy(model(x.to(device)), y.to(device)).backward()
                if watching is not None:
                    watching()
                optimiser.step()
                order.append(y)
                step += 1
        assert step == 100
        assert watching is None or len(watching.watch.snapshots) == 7
        return fingerprint(model, optimiser), order

    (alone, order), (observed, order_observed) = run(False), run(True)
    assert_same(alone, observed)
    assert torch.equal(torch.cat(order), torch.cat(order_observed))
    assert not torch.equal(order[0], order[5])  # the loader did shuffle


def test_train_mode_draws_dropout_from_a_stream_of_its_own(device: str) -> None:
    """mode="train" keeps dropout on; the draw belongs to `seed`, not to the moment."""
    seed()
    model, probe = dropout_mlp().to(device), probe_of("vector")
    before = dict(leaves(streams()))
    first = richter.measure(model, probe, mode="train", seed=0)
    assert_same(before, dict(leaves(streams())))
    torch.rand(1)
    assert same_rows(first, richter.measure(model, probe, mode="train", seed=0))
    assert first.value("nfc", "0") != richter.measure(model, probe, mode="train", seed=1).value("nfc", "0")
    assert first.value("nfc", "0") != richter.measure(model, probe).value("nfc", "0")


def test_train_mode_is_refused_where_examples_mix(device: str) -> None:
    model = batch_norm_cnn().to(device).train()
    optimiser = optimisers(model, "sgd")
    with undisturbed(model, optimiser), pytest.raises(MixingError, match="BatchNorm in train mode"):
        richter.measure(model, probe_of("image"), mode="train")


class Centred(nn.Module):
    """A batch norm of one's own."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.training else x


def test_train_mode_is_refused_where_examples_mix_and_dropout_hides_it(device: str) -> None:
    """With dropout, outputs differ from pass to pass anyway; mixed examples must be seen all the same."""
    model = nn.Sequential(nn.Linear(5, 8), Centred(), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 3)).to(device)
    with pytest.raises(MixingError, match="mixes examples"):
        richter.measure(model, probe_of("vector"), mode="train")


def test_modes_of_submodules_are_put_back_one_by_one(device: str) -> None:
    """A batch norm kept in eval mode while the rest trains, and a model in eval mode with one dropout on."""
    model = batch_norm_cnn().to(device).train()
    model[1].eval()
    with undisturbed(model, optimisers(model, "sgd")):
        richter.measure(model, probe_of("image"))
    assert [m.training for m in model] == [i != 1 for i in range(len(model))]
    model.eval()
    model[3].train()
    with undisturbed(model, optimisers(model, "sgd")):
        richter.measure(model, probe_of("image"))
    assert [m.training for m in model] == [i == 3 for i in range(len(model))]


@pytest.mark.parametrize("build", [mlp, InPlaceInput], ids=["plain", "a forward that writes into its input"])
def test_the_probe_and_the_data_behind_it_stay_as_they_were(build: Callable[[], nn.Module], device: str) -> None:
    x = torch.randn(16, 5, generator=torch.Generator().manual_seed(1)).to(device)
    data, probe = x.clone(), richter.Probe(x, torch.arange(16) % 3, kernel_examples=6)
    model = build().to(device)
    with contextlib.suppress(CaptureError):  # refusing such a model is one way
        richter.measure(model, probe)
    assert torch.equal(x, data)
    assert torch.equal(probe.x, data)


def test_a_measurement_on_the_cpu_seeds_no_other_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU in use, torch.manual_seed leaves a seed behind for the moment one is: a stream, too."""
    seeded: list[Any] = []
    for name in ("cuda", "xpu", "mps"):
        part = getattr(torch, name)
        monkeypatch.setattr(part, "manual_seed_all" if name != "mps" else "manual_seed", seeded.append)
    if torch.cuda.is_available():
        pytest.skip("the states of all GPUs are compared elsewhere")
    richter.measure(mlp(), probe_of("vector"))
    assert seeded == []
    richter.Probe.from_loader(TensorDataset(torch.randn(40, 5), torch.arange(40) % 3), n=12)
    assert seeded == []


# -------------------------------------------------------------------------------------------------- compiled models


class Dropping(nn.Module):
    """A forward of one's own: torch does not compile nn.Sequential in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.readout = nn.Linear(5, 8), nn.Dropout(0.3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.dropout(torch.relu(self.first(x))))


@pytest.mark.parametrize("how", ["wrapped", "in place", "a part"])
def test_a_compiled_model_is_not_compiled_again(how: str, device: str) -> None:
    """torch.compile with a backend that counts: as many graphs with the Observer as without."""
    graphs: list[int] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(len(graphs))
        return graph.forward

    def build() -> nn.Module:
        model: Any = Dropping()
        if how == "in place":
            model.compile(backend=count)
        elif how == "a part":
            model.first = torch.compile(model.first, backend=count)
        return torch.compile(model, backend=count) if how == "wrapped" else model

    setting = Setting(build, steps=STEPS if how == "wrapped" else 40)
    torch._dynamo.reset()
    alone, _ = train(setting, device, observed=False)
    expected = len(graphs)
    graphs.clear()
    torch._dynamo.reset()
    observed, watching = train(setting, device)
    assert_same(alone, observed)
    assert len(graphs) == expected > 0
    before = dict(torch._dynamo.utils.counters["stats"])
    assert watching is not None
    watching.watch.when = watching.watch._schedule.due = lambda step: True
    watching()
    assert dict(torch._dynamo.utils.counters["stats"]) == before
    first = "first._orig_mod" if how == "a part" else "first"  # as in named_modules()
    assert watching.watch.snapshots[-1].layers == [first, "readout", "*"]
    torch._dynamo.reset()


def test_a_distributed_model(device: str, tmp_path: Path) -> None:
    """DistributedDataParallel keeps hooks and buckets of gradients beside the parameters: they stay as they are."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        check(Setting(lambda: nn.parallel.DistributedDataParallel(batch_norm_cnn().to(device)), "image"), device)
    finally:
        torch.distributed.destroy_process_group()


class Holder(nn.Module):
    """A part of it has the name that torch gives to the inside of a wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module, self.readout = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.module(x)))


@pytest.mark.parametrize("wrappers", [("",), ("module.",), ("_orig_mod.",), ("module.", "_orig_mod."), ("_orig_mod.", "module.")],
                         ids="".join)
@pytest.mark.parametrize("build", [mlp, Holder])
def test_initial_weights_taken_from_a_wrapped_model(build: Callable[[], nn.Module], wrappers: tuple[str, ...]) -> None:
    """The names of a state_dict say how the model was wrapped; the weights are those of the model inside."""
    seed()
    model = build()
    start = {k: v + 0.1 for k, v in model.state_dict().items()}
    expected = richter.measure(model, probe_of("vector"), FEW, initial=start)
    found = richter.measure(model, probe_of("vector"), FEW, initial={"".join(wrappers) + k: v for k, v in start.items()})
    assert same_rows(expected, found)
    assert math.isfinite(found.value("double_centred_nfc", "module" if build is Holder else "0"))


# ------------------------------------------------------------------------------------------------------------ hooks


def test_hooks_of_parameters_do_not_fire(device: str) -> None:
    """Hooks on gradients scale them, count them and clear them after a fused step: none may hear of a measurement."""
    fired: list[str] = []

    def build() -> nn.Module:
        model = mlp()
        for name, p in model.named_parameters():
            p.register_hook(lambda g, name=name: fired.append(name) or 0.5 * g)
            p.register_post_accumulate_grad_hook(lambda p, name=name: fired.append(f"{name} accumulated"))
        return model

    setting = Setting(build, steps=40)
    alone, _ = train(setting, device, "sgd", observed=False)
    expected = list(fired)
    fired.clear()
    observed, _ = train(setting, device, "sgd")
    assert_same(alone, observed)
    assert fired == expected
    assert len(fired) == 40 * 2 * 6


@pytest.mark.filterwarnings("ignore::richter.instrument.evaluate.RichterWarning")
def test_hooks_of_modules_stay_and_keep_their_order(device: str) -> None:
    """A user's hooks that change what a layer reads, returns and is asked for."""

    def build() -> nn.Module:
        model = mlp()
        model[0].register_forward_pre_hook(lambda m, args: (1.5 * args[0],))
        model[0].register_forward_hook(lambda m, args, z: z + 0.1)
        model[2].register_forward_hook(lambda m, args, kwargs, z: z * 0.9, with_kwargs=True, prepend=True)
        model[2].register_full_backward_hook(lambda m, given, asked: (0.5 * given[0],))
        model[4].register_full_backward_pre_hook(lambda m, asked: (0.5 * asked[0],))
        return model

    check(Setting(build, steps=40), device, "sgd")


def test_hooks_that_change_the_function_are_part_of_it(device: str) -> None:
    """A forward hook that doubles a layer is measured like a layer that is doubled."""
    seed()
    model = mlp().to(device)
    alone = richter.measure(model, probe_of("vector"))
    handle = model[2].register_forward_hook(lambda m, args, z: z.mul(2.0))
    hooked = richter.measure(model, probe_of("vector"))
    handle.remove()
    with torch.no_grad():
        model[2].weight.mul_(2.0)
        model[2].bias.mul_(2.0)
    doubled = richter.measure(model, probe_of("vector"))
    for layer in ("0", "2", "4"):
        assert hooked.value("nfc", layer) == pytest.approx(doubled.value("nfc", layer), rel=1e-5)
    assert abs(hooked.value("nfc", "0") - alone.value("nfc", "0")) > 1e-3


# ------------------------------------------------------------------------------------------------------- exceptions


class Breaks(nn.Module):
    """Fine while it trains; on the probe its output is NaN between two steps of training."""

    def __init__(self) -> None:
        super().__init__()
        self.body = batch_norm_cnn()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        f = self.body(x)
        if self.training:
            self.steps += 1
            return f
        return f * math.nan if 10 <= self.steps < 20 else f


def test_nan_in_the_middle_of_training(device: str) -> None:
    alone, _ = train(Setting(Breaks, "image", steps=30), device, observed=False)
    outcomes: list[str] = []

    def step(model: nn.Module, optimiser: torch.optim.Optimizer, draw: Any, look: Look) -> None:
        def guarded() -> None:
            try:
                look()
                outcomes.append("measured")
            except CaptureError as error:
                outcomes.append("refused" if "NaN or Inf" in str(error) else str(error))
        plain(model, optimiser, draw, guarded)

    observed, watching = train(Setting(Breaks, "image", step, steps=30), device, when=7)
    assert_same(alone, observed)
    assert watching is not None
    measured = [s.step for s in watching.watch.snapshots]
    # the first look of a step comes before the step is counted
    assert measured == [i for i in range(0, 30 * LOOKS, 7) if not 37 <= i < 77]
    assert outcomes.count("refused") == sum(37 <= i < 77 for i in range(0, 30 * LOOKS, 7)) > 3


FAILURES = ["richter.instrument.subject.surveyed", "richter.instrument.survey.memo.renewed",
            "richter.instrument.survey.examine.survey",
            "richter.instrument.stream.passed", "richter.instrument.statistics.kernels.mirror",
            "richter.instrument.evaluate.Evaluation._row", "richter.instrument.statistics.moments.GroupSums.add",
            "richter.instrument.survey.survey.forward", "richter.instrument.capture.forward.get_gradient_edge",
            "richter.instrument.capture.state.State.in_place", "richter.instrument.stream.Check",
            "torch.autograd.grad", "richter.instrument.observe.Snapshot"]  # fmt: skip


@functools.cache
def without_failure(device: str, observed: bool) -> tuple[Fingerprint, Watching | None]:
    return train(Setting(Checkpointed, steps=4), device, observed=observed, when=5)


@pytest.mark.parametrize(("where", "error"), [*((where, KeyboardInterrupt) for where in FAILURES),
                                              *((where, RuntimeError) for where in FAILURES[3:6])])
def test_a_failure_while_measuring(where: str, error: type[BaseException], device: str,
                                   monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a measurement breaks off, training goes on as if nothing had been, and so does the next measurement."""
    (alone, _), (faultless, reference) = without_failure(device, False), without_failure(device, True)
    failed: list[str] = []

    def step(model: nn.Module, optimiser: torch.optim.Optimizer, draw: Any, look: Look) -> None:
        def guarded() -> None:
            if not (look.calls == 5 and not failed):  # type: ignore[attr-defined]
                look()
                return
            with monkeypatch.context() as patch:
                if ".survey." in where:  # which is not looked at every time
                    patch.setattr(Subject, "renew", functools.partialmethod(Subject.renew, look=True))
                if ".survey.examine." in where or ".survey.layouts." in where:  # where the survey is made anew
                    patch.setattr("richter.instrument.survey.memo.renewed", lambda *_: None)
                owner, name = place_of(where)
                patch.setattr(owner, name, fails_the_second_time(getattr(owner, name), name, error))
                with pytest.raises(error, match="on purpose"):
                    look()
            failed.append(where)
        plain(model, optimiser, draw, guarded)

    observed, watching = train(Setting(Checkpointed, step=step, steps=4), device, when=5)
    assert failed == [where]
    assert_same(alone, observed)
    assert_same(alone, faultless)
    assert watching is not None
    assert reference is not None
    assert [s.step for s in watching.watch.snapshots] == [0, 10, 15]
    for a, b in zip(watching.watch.snapshots, [s for s in reference.watch.snapshots if s.step != 5], strict=True):
        assert same_rows(a, b)


def place_of(where: str) -> tuple[Any, str]:
    """(module or class, name in it): a package may have a function of a module's name, and the module is meant."""
    owner, _, name = where.rpartition(".")
    return sys.modules.get(owner) or pkgutil.resolve_name(owner), name


def fails_the_second_time(real: Callable[..., Any], name: str, error: type[BaseException]) -> Callable[..., Any]:
    """The function itself, until it is called the second time (the first, if it is called once a measurement)."""
    calls: list[int] = []
    last = 1 if name in ("survey", "renewed", "Snapshot", "surveyed", "record") else 2

    def function(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) >= last:
            raise error("on purpose")
        return real(*args, **kwargs)

    return function


@pytest.mark.parametrize("place", ["forward", "forward_pre"])
def test_an_interrupt_inside_a_hook(place: str, device: str) -> None:
    """Ctrl-C while a user's forward hook runs on the probe: at each forward pass of a first measurement in turn, and at each of a
    later one, which knows more."""
    seed()
    model = Checkpointed().to(device).train()
    optimiser, probe, armed, passes = optimisers(model, "adam"), probe_of("vector"), [10**9], [0]

    def hook(module: nn.Module, *args: Any) -> None:
        if not module.training:
            passes[0] += 1
            if passes[0] > armed[0]:
                raise KeyboardInterrupt("on purpose")

    getattr(model.second[0], f"register_{place}_hook")(hook)
    watch = richter.Observer(model, probe, budget=None, when=1)
    plain(model, optimiser, lambda: batch("vector", 8, device), lambda: None)
    expected = watch(0)
    total, passes[0] = passes[0], 0
    assert expected is not None
    assert total > 5
    with torch.no_grad():
        model.second[0].weight.mul_(1.0)  # written to, as by a step of training
    assert same_rows(expected, watch(1))
    later, passes[0] = passes[0], 0
    assert 2 < later <= total
    for armed[0] in range(total):
        passes[0] = 0
        with undisturbed(model, optimiser), pytest.raises(KeyboardInterrupt, match="on purpose"):
            richter.measure(model, probe, initial=watch.initial)
    for armed[0] in range(later):
        passes[0] = 0
        with torch.no_grad():
            model.second[0].weight.mul_(1.0)
        with undisturbed(model, optimiser), pytest.raises(KeyboardInterrupt, match="on purpose"):
            watch(1)
    armed[0], passes[0] = 10**9, 0
    with undisturbed(model, optimiser):
        found = watch(2)
    assert found is not None
    assert same_rows(expected, found)


def test_an_interrupt_while_hooks_are_put_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the first hook and the last one: those that are on come off."""
    model = mlp().to(device)
    optimiser, real, calls = optimisers(model, "sgd"), nn.Module.register_forward_hook, [0]

    def register(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 4:
            raise KeyboardInterrupt("on purpose")
        return real(*args, **kwargs)

    with undisturbed(model, optimiser), monkeypatch.context() as patch:
        patch.setattr(nn.Module, "register_forward_hook", register)
        with pytest.raises(KeyboardInterrupt, match="on purpose"):
            richter.measure(model, probe_of("vector"))


# -------------------------------------------------------------------------------------------- surrounding contexts


def same_rows(a: richter.Snapshot, b: richter.Snapshot) -> bool:
    """Layers, measures, values, errors and notes are equal, to the last bit; NaN equals NaN."""
    def plain_rows(snap: richter.Snapshot) -> list[str]:
        return [repr((r.layer, r.measure, r.value, r.error, r.note)) for r in snap.rows]
    return plain_rows(a) == plain_rows(b)


AROUND: dict[str, Callable[[str], contextlib.AbstractContextManager[Any]]] = {
    "no_grad": lambda device: torch.no_grad(), "inference_mode": lambda device: torch.inference_mode(),
    "autocast": lambda device: torch.autocast(device, torch.bfloat16),
    "detect_anomaly": lambda device: torch.autograd.set_detect_anomaly(True),
    "cached parametrisations": lambda device: parametrize.cached(),
    "default dtype": lambda device: default_dtype(torch.float64),
}  # fmt: skip


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_the_surroundings_change_no_number(around: str, device: str) -> None:
    """The same values inside torch.no_grad(), inference_mode(), autocast, ... as outside."""
    seed()
    model, probe = new_norms().to(device).train(), probe_of("vector")
    initial = {k: v.clone() for k, v in model.state_dict().items()}
    optimiser = optimisers(model, "sgd")
    plain(model, optimiser, lambda: batch("vector", 8, device), lambda: None)
    outside = richter.measure(model, probe, initial=initial)
    assert outside.value("weight_change", "0") > 0
    with AROUND[around](device):
        with undisturbed(model, optimiser):
            inside = richter.measure(model, probe, initial=initial)
        assert same_rows(outside, inside)
    assert same_rows(outside, richter.measure(model, probe, initial=initial))


@pytest.mark.parametrize("around", ["no_grad", "inference_mode", "autocast"])
def test_an_observer_made_in_such_surroundings(around: str, device: str) -> None:
    """The probe, the initial weights and the first look may come from a block that evaluates."""
    seed()
    model = mlp().to(device)
    reference = richter.Observer(model, probe_of("vector"), budget=None, when=1)
    with AROUND[around](device):
        watch = richter.Observer(model, probe_of("vector"), budget=None, when=1)
        first = watch(0)
    plain(model, optimisers(model, "sgd"), lambda: batch("vector", 8, device), lambda: None)
    expected = reference(1)
    second = watch(1)
    assert first is not None
    assert second is not None
    assert expected is not None
    assert same_rows(expected, second)


class Remembers(nn.Module):
    """Keeps what it saw: in a number, a tensor, a list, a dict, and in an attribute made by the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls, self.last = nn.Linear(5, 3), 0, torch.zeros(1)
        self.sizes: list[int] = []
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.last = self.layer(x)
        self.sizes.append(len(x))
        self.cache["x"] = x
        self.made = x.mean()
        return self.last


@pytest.mark.parametrize("what", ["calls", "last", "sizes", "cache", "made"])
def test_what_a_model_remembers_is_not_of_the_probe(what: str, device: str) -> None:
    """Also what the forward pass writes into attributes is as it was."""
    model = Remembers().to(device)
    richter.measure(model, probe_of("vector"))
    fresh = Remembers()
    assert hasattr(model, what) == hasattr(fresh, what)
    if what != "made":
        assert getattr(model, what) == getattr(fresh, what)
    model(torch.ones(2, 5, device=device))
    before = getattr(model, what)
    kept = before.copy() if isinstance(before, (list, dict)) else before
    richter.measure(model, probe_of("vector"))
    assert getattr(model, what) is before
    assert len(kept) == len(before) if isinstance(before, (list, dict)) else kept is before
    assert model.sizes == [2] or what != "sizes"
    assert model.cache["x"].shape == (2, 5) or what != "cache"


def test_a_graph_kept_by_the_user_survives(device: str) -> None:
    """Between two backward passes through one graph, with parameters that the forward pass saved."""
    seed()
    model = batch_norm_cnn().to(device).train()
    x, _ = batch("image", 8, device)
    loss = model(x).square().mean()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in model.parameters()]
    richter.measure(model, probe_of("image"))
    loss.backward()
    for p, g in zip(model.parameters(), once, strict=True):
        assert torch.equal(p.grad, 2 * g)


# ---------------------------------------------------------------------------------- the comparison itself can fail


def step_batch_norm(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model(torch.ones(4, 2, 4, 4))


def round_trip(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    """The same values, but the user's graph would refuse its backward pass."""
    with torch.no_grad():
        model[0].weight.mul_(2).mul_(0.5)


def replace_gradient(model: nn.Module, optimiser: torch.optim.Optimizer) -> None:
    model[0].weight.grad = model[0].weight.grad.clone()


DISTURBANCES: dict[str, Callable[[Any, Any], Any]] = {
    "torch stream": lambda m, o: torch.rand(1), "numpy stream": lambda m, o: np.random.rand(),  # noqa: NPY002
    "python stream": lambda m, o: random.random(), "mode": lambda m, o: m[3].eval(),
    "forward hook": lambda m, o: m[0].register_forward_hook(print),
    "backward hook": lambda m, o: m[0].register_full_backward_hook(print),
    "parameter hook": lambda m, o: m[0].weight.register_hook(print),
    "requires_grad": lambda m, o: m[0].weight.requires_grad_(False),
    "gradient": lambda m, o: m[0].weight.grad.add_(1e-7), "no gradient": lambda m, o: m[0].zero_grad(),
    "buffers": step_batch_norm, "optimiser": lambda m, o: o.step(), "write": round_trip, "object": replace_gradient,
    "grad mode": lambda m, o: torch.set_grad_enabled(False),
    "attribute": lambda m, o: setattr(m[0], "stride", (2, 2)) or setattr(m[0], "extra", torch.ones(1)),
}  # fmt: skip


@pytest.mark.parametrize("what", DISTURBANCES)
def test_a_disturbance_is_seen(what: str) -> None:
    """The comparison on which this file rests notices each single kind of disturbance."""
    seed()
    model = batch_norm_cnn().train()
    optimiser = optimisers(model, "sgd")
    plain(model, optimiser, lambda: batch("image", 8, "cpu"), lambda: None)
    with undisturbed(model, optimiser):
        pass
    try:
        with pytest.raises(AssertionError), undisturbed(model, optimiser):
            DISTURBANCES[what](model, optimiser)
    finally:
        torch.set_grad_enabled(True)
