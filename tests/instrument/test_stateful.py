"""Models whose forward pass changes something that they keep, in eval mode too: training with and without an Observer is the same
to the last bit, and everything that hangs on the model is the same object with the same contents."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import io
import itertools
import random
import re
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
import torch
import torch.nn.functional as F
from test_identity import FEW, assert_same, batch, fingerprint, mlp, optimisers, own_stream, probe_of, seed  # noqa: F401
from test_identity import objects as held_objects
from torch import Tensor, nn

import richter
from richter.core import CaptureError
from richter.instrument.capture import attributes as remembered
from richter.instrument.capture import forward, quiet, state_of
from zoo import CASES

# ------------------------------------------------------------------------------------------------ what a model may keep


class Slotted:
    __slots__ = ("__hidden", "calls", "late")

    def __init__(self) -> None:
        self.calls, self.__hidden = 0, [0.0]

    def step(self) -> float:
        self.calls += 1
        self.late = self.calls
        self.__hidden.append(self.calls / 2)
        return sum(self.__hidden)


class Cache:
    """Like the caches of keys and values of language models: rows are added to tensors inside lists."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.seen, self.itself = 0, self

    def step(self) -> float:
        self.seen += 1
        self.keys.append(torch.full((2,), float(self.seen)))
        self.keys[0].add_(1.0)
        return float(sum(k.sum() for k in self.keys))


class Crooked(Cache):
    """Its attributes cannot be read or written in the usual way."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    @property
    def broken(self) -> Any:
        raise RuntimeError("broken")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not to be compared")

    def __hash__(self) -> int:
        raise RuntimeError("not to be hashed")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


@dataclass(frozen=True)
class Frozen:
    values: list[float] = field(default_factory=lambda: [1.0])
    calls: int = 0

    def step(self) -> float:
        self.values.append(len(self.values))
        object.__setattr__(self, "calls", self.calls + 1)
        return sum(self.values) + self.calls


class Pair(NamedTuple):
    values: list[float]
    ids: Any


class Drawer(dict):  # type: ignore[type-arg]
    """A dict with attributes, whose methods are not those of a dict."""

    opened = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.opened += 1

    def clear(self) -> None:
        raise RuntimeError("never")

    def step(self) -> float:
        self[len(self)] = 0.5
        return self.opened + sum(self.values())


def counter() -> Callable[[], int]:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def with_default(seen: list[int] = []) -> int:  # noqa: B006
    seen.append(len(seen))
    return sum(seen)


def add(box: list[float], by: float) -> float:
    box.append(by)
    return sum(box)


def fill(a: Any) -> float:
    a *= 0.9
    a += 1.0
    return float(a.sum())


def count_up(c: Any) -> float:
    c["calls"] = c.get("calls", 0) + 1
    return float(c["calls"])


def roll(d: collections.deque[float]) -> float:
    d.append(d[-1] + d[0])
    return sum(d)


def grow(nested: list[Any]) -> float:
    nested[0]["a"][1].append(len(nested[0]["a"][1]))
    nested[1][0].add(float(len(nested[1][0])))
    return float(sum(nested[0]["a"][1])) + sum(nested[1][0])


def spread(s: Any) -> float:
    s.calls, s.inner.values = s.calls + 1, [*s.inner.values, s.calls]
    s.inner.values[0] += 1
    return float(sum(s.inner.values))


def turn(od: collections.OrderedDict[str, float]) -> float:
    od.move_to_end(next(iter(od)))
    return float(next(iter(od.values())))


def renew(d: dict[str, float]) -> float:
    key = next(iter(d))
    d[key] = d.pop(key) + 1.0  # now at the end
    return next(iter(d.values()))


def default(d: collections.defaultdict[int, list[int]]) -> float:
    d[len(d)].append(len(d))
    return float(sum(map(len, d.values()))) + len(d)


def hidden_norm(modules: list[nn.Module]) -> float:
    """A module that is not one of the model's."""
    modules[0](torch.ones(4, 2) * 3)
    return float(modules[0].running_mean.sum())


def read_line(f: io.TextIOBase) -> float:
    line = f.readline()
    return float(len(line))


def write_line(f: io.StringIO) -> float:
    f.write("x")
    return float(len(f.getvalue()))


def objects_of(a: Any) -> float:
    a[0].append(1.0)
    a[1] = len(a[0])
    return float(a[1])


def pull(it: Any) -> float:
    value = next(it)
    return float(sum(value) if isinstance(value, tuple) else value)


def views(pair: list[Tensor]) -> float:
    """Two tensors of one memory."""
    pair[1].add_(1.0)
    return float(pair[0].sum())


def dynamic_cache() -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.DynamicCache()


def extend(cache: Any) -> float:
    keys, _ = cache.update(torch.ones(1, 1, 1, 2), torch.ones(1, 1, 1, 2), 0)
    return float(keys.shape[2])


def tabulate(table: pandas.DataFrame) -> float:
    table.loc[0, "a"] += 1.0
    table.loc[len(table)] = [0.5]
    return float(table["a"].sum())


def bag_of(n: int) -> set[float]:
    return {float(i) for i in range(n)}


KINDS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "tensor": (lambda: torch.zeros(3), fill), "deque": (lambda: collections.deque([1.0, 2.0], maxlen=4), roll),
    "Counter": (collections.Counter, count_up), "nested": (lambda: [{"a": (1, [0])}, [{1.0}]], grow),
    "SimpleNamespace": (lambda: types.SimpleNamespace(calls=0, inner=types.SimpleNamespace(values=[1.0])), spread),
    "torch generator": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(1, generator=g).item()),
    "numpy generator": (lambda: np.random.default_rng(3), lambda g: g.random()),
    "itertools.count": (lambda: itertools.count(3), pull), "array": (lambda: np.zeros(3), fill),
    "cache": (Cache, lambda c: c.step()), "DynamicCache": (dynamic_cache, extend),
    # the same with other things
    "numpy RandomState": (lambda: np.random.RandomState(3), lambda g: g.rand()),
    "numpy bits": (lambda: np.random.PCG64(3), lambda g: float(g.random_raw() % 100)),
    "random.Random": (lambda: random.Random(3), lambda g: g.random()),
    "cycle": (lambda: itertools.cycle(range(17)), pull), "list iterator": (lambda: iter(list(range(999))), pull),
    "enumerate": (lambda: enumerate(range(5, 999)), pull),
    "zip": (lambda: zip(itertools.count(), itertools.cycle("ab"), strict=False), lambda it: float(next(it)[0])),
    "map": (lambda: map(float, itertools.count()), pull), "chain": (lambda: itertools.chain([1], itertools.count()), pull),
    "reversed": (lambda: reversed(list(range(999))), pull), "islice": (lambda: itertools.islice(range(999), 2, 900), pull),
    "dict iterator": (lambda: iter(dict.fromkeys(range(999))), pull), "range iterator": (lambda: iter(range(999)), pull),
    "iterator in a tuple": (lambda: Pair([1.0], itertools.count()), lambda p: pull(p.ids) + add(p.values, 1.0)),
    "OrderedDict": (lambda: collections.OrderedDict(zip("abcdefghijklmnopq", range(17), strict=True)), turn),
    "order of a dict": (lambda: {"a": 1.0, "b": 2.0}, renew),
    "defaultdict": (lambda: collections.defaultdict(list), default), "dict with attributes": (Drawer, Drawer.step),
    "set": (lambda: bag_of(5), lambda s: s.add(float(len(s))) or sum(s)), "bytearray": (lambda: bytearray(b"a"),
                                                                                      lambda b: b.append(1) or float(len(b))),
    "slots": (Slotted, Slotted.step), "frozen dataclass": (Frozen, Frozen.step), "crooked object": (Crooked, Cache.step),
    "closure": (counter, lambda f: float(f())), "default argument": (lambda: with_default, lambda f: float(f())),
    "partial": (lambda: functools.partial(add, [1.0]), lambda f: f(1.0)), "bound method": (lambda: Cache().step, lambda f: f()),
    "object array": (lambda: np.array([[1.0], 0], dtype=object), objects_of), "file in memory": (io.StringIO, write_line),
    "place in a file": (lambda: io.StringIO("a\nbb\nccc\n" * 99), read_line),
    "views": (lambda: (lambda t: [t, t[1:]])(torch.zeros(3)), views),
    "hidden module": (lambda: [nn.BatchNorm1d(2)], hidden_norm), "weak reference": (lambda: Weak(), lambda w: w.step()),
    "complex tensor": (lambda: torch.zeros(2, dtype=torch.complex64), lambda t: float(t.add_(1j).imag.sum())),
    "transposed array": (lambda: np.zeros((3, 2)).T, fill),
    "masked array": (lambda: np.ma.array([1.0, 2.0], mask=[0, 1]), lambda a: a.__setitem__(1, a.data[1] + 1.0) or float(a[1])),
    "table": (lambda: pandas.DataFrame({"a": [1.0, 2.0]}), tabulate),
    "method of an iterator": (lambda: [itertools.count().__next__], lambda f: float(f[0]())),
    "factory of a defaultdict": (lambda: collections.defaultdict(itertools.count().__next__), lambda d: float(d[len(d)])),
    "sparse tensor": (lambda: torch.eye(3).to_sparse(), lambda t: float(t.mul_(1.1).to_dense().sum())),
    "NaN": (lambda: torch.tensor([float("nan"), 1.0]), lambda t: fill(t[1:])),
}  # fmt: skip


class Weak:
    """Refers weakly to what it keeps, and itself."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.ref, self.known = weakref.ref(self.cache), weakref.WeakValueDictionary({0: self.cache})

    def step(self) -> float:
        cache = self.ref()
        assert cache is not None
        return cache.step() + len(self.known)


class Keeping(nn.Module):
    """A model around which something is kept: every forward pass changes it, and training depends on it."""

    def __init__(self, body: nn.Module, kind: str) -> None:
        super().__init__()
        build, self.step = KINDS[kind]
        self.body, self.state = body, build()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = self.step(self.state)
        out = self.body(*args, **kwargs)
        return scaled(out, 1.0 + 0.01 * np.sin(value)) if self.training else out


def scaled(out: Any, by: float) -> Any:
    if isinstance(out, Tensor):
        return out * by
    if isinstance(out, dict):  # what transformers returns is one
        return {"logits": out["logits"] * by}
    return tuple(scaled(part, by) for part in out)


def contents(thing: Any, seen: set[int] | None = None) -> str:
    """Everything inside an object that can be written down, with the identity of objects."""
    seen = set() if seen is None else seen
    if id(thing) in seen:
        return f"again {id(thing)}"
    seen.add(id(thing))
    inner = functools.partial(contents, seen=seen)
    if isinstance(thing, Tensor):
        return f"{id(thing)} {thing._version} {thing.requires_grad} {thing.to_dense().tolist()}"
    if isinstance(thing, np.ndarray):
        values = [inner(v) for v in thing.ravel().tolist()] if thing.dtype.hasobject else thing.tolist()
        return f"{id(thing)} {thing.flags.writeable} {values}"
    if isinstance(thing, torch.Generator):
        return str(thing.get_state().tolist())
    if isinstance(thing, (np.random.Generator, np.random.PCG64)):
        return str(getattr(thing, "bit_generator", thing).state)
    if isinstance(thing, np.random.RandomState):
        return str([v.tolist() if isinstance(v, np.ndarray) else v for v in thing.get_state()])
    if isinstance(thing, random.Random):
        return str(thing.getstate())
    if isinstance(thing, pandas.DataFrame):
        return f"{id(thing)} {id(thing._mgr)} {thing.to_string()}"
    if isinstance(thing, io.StringIO):
        return f"{thing.tell()} {thing.getvalue()}"
    parts = []
    if isinstance(thing, dict):
        parts += [f"{k!r}: {inner(v)}" for k, v in thing.items()]
    elif isinstance(thing, (list, tuple, set, collections.deque)):
        parts += [inner(v) for v in thing]
    with contextlib.suppress(Exception):
        parts += [f"{k}: {inner(v)}" for k, v in object.__getattribute__(thing, "__dict__").items()]
    return f"{id(thing)} {type(thing).__name__} {parts or repr(thing)}" if not isinstance(thing, Crooked) else str(parts)


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Nothing that hangs on the modules is another object or holds something else, however the block ends."""
    before, objects = contents([vars(m) for m in model.modules()]).split(" ", 1)[1], held_objects(model)
    try:
        yield
    finally:
        assert contents([vars(m) for m in model.modules()]).split(" ", 1)[1] == before
        now = held_objects(model)
        assert objects.keys() == now.keys()
        assert [k for k in now if now[k] is not objects[k] and now[k] != objects[k]] == []


def trained(build: Callable[[], nn.Module], steps: int, looks: tuple[int, ...], x: Callable[[], tuple[Any, Any]],
            probe: richter.Probe, output: Callable[[Any], Tensor] | None = None) -> tuple[dict[str, Any], int]:
    """The fingerprint after training, measured before these steps in the middle of everything; and how many measurements."""
    seed()
    with_default.__defaults__[0].clear()  # type: ignore[index]
    model = build().train()
    optimiser, measured = optimisers(model, "adam"), 0
    watch = richter.Observer(model, probe, measures=FEW, output=output, budget=None, when=1) if looks else None
    for step in range(steps):
        optimiser.zero_grad()
        inputs, y = x()
        out = model(**inputs) if isinstance(inputs, dict) else model(*inputs) if isinstance(inputs, tuple) else model(inputs)
        out = out if output is None else output(out)
        loss = out.square().mean() if y is None else F.cross_entropy(out, y)
        loss.backward()
        if watch is not None and step in looks:
            with untouched(model):
                assert watch(step) is not None
            measured += 1
        optimiser.step()
    state = getattr(model, "state", None)
    written = repr(state) if isinstance(state, (list, dict, set, collections.deque, np.ndarray, Tensor)) else None
    return {**fingerprint(model, optimiser), "kept": re.sub("0x[0-9a-f]+", "", written or "")}, measured


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_put_back(kind: str) -> None:
    alone, observed = (trained(lambda: Keeping(mlp(), kind), 4, looks, lambda: batch("vector", 8, "cpu"), probe_of("vector"))[0]
                       for looks in ((), (0, 2)))
    assert_same(alone, observed)


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_matters(kind: str) -> None:
    """What the test above rests on: one further forward pass in eval mode is seen in what the model keeps or trains to."""
    seed()
    model = Keeping(mlp(), kind)
    first = [model.step(model.state) for _ in range(4)]
    if kind == "cycle":
        assert first[0] != first[1]
    else:
        assert len(set(first)) > 1


# -------------------------------------------------------------------------------------------------------- architectures


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 23}
TEXT = {**SMALL, "max_position_embeddings": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SHARED = {**TEXT, "num_key_value_heads": 1}  # keys and values shared by the heads
GPT = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 23, "n_positions": 16, "bos_token_id": 1, "eos_token_id": 2}
VISION = {"num_channels": 2, "num_labels": 3}
ARCHITECTURES: dict[str, dict[str, Any]] = {  # of transformers: model, and what its configuration is given
    "LlamaForCausalLM": SHARED, "MistralForCausalLM": {**SHARED, "head_dim": 8}, "Qwen2ForCausalLM": SHARED,
    "PhiForCausalLM": {**TEXT, "resid_pdrop": 0.1}, "GPTNeoXForCausalLM": {**TEXT, "hidden_dropout": 0.1},
    "OPTForCausalLM": {**TEXT, "ffn_dim": 24, "word_embed_proj_dim": 16}, "OlmoForCausalLM": TEXT,
    "BloomForCausalLM": {**TEXT, "hidden_dropout": 0.1}, "FalconForCausalLM": TEXT, "GemmaForCausalLM": {**SHARED, "head_dim": 8},
    "StableLmForCausalLM": SHARED, "GPTBigCodeForCausalLM": GPT, "CodeGenForCausalLM": {**GPT, "n_head": 4, "rotary_dim": 2},
    "GPTJForCausalLM": {**GPT, "rotary_dim": 4},
    "XGLMForCausalLM": {"d_model": 16, "ffn_dim": 24, "num_layers": 1, "attention_heads": 2, "vocab_size": 23},
    "MambaForCausalLM": {"hidden_size": 16, "state_size": 4, "num_hidden_layers": 1, "vocab_size": 23},
    "DistilBertForMaskedLM": {"dim": 16, "n_layers": 1, "n_heads": 2, "hidden_dim": 24, "vocab_size": 23},
    "RobertaForMaskedLM": TEXT, "ElectraForMaskedLM": {**TEXT, "embedding_size": 16},
    "AlbertForMaskedLM": {**TEXT, "embedding_size": 8},
    "ConvNextForImageClassification": {**VISION, "patch_size": 2, "hidden_sizes": [6, 8], "depths": [1, 1], "num_stages": 2},
    "MobileNetV2ForImageClassification": {**VISION, "image_size": 8, "depth_multiplier": 0.25},
    "SwinForImageClassification": {**VISION, "image_size": 8, "patch_size": 2, "embed_dim": 8, "depths": [1], "num_heads": [2],
                                   "window_size": 2},
    "DeiTForImageClassification": {**VISION, **SMALL, "image_size": 8, "patch_size": 4},
}  # fmt: skip
QUICK = ("LlamaForCausalLM",)


def each(names: Iterable[str], quick: Sequence[str] = ()) -> Any:
    """Each of them with its own kind of thing that is kept; all but the quick ones are long."""
    return pytest.mark.parametrize(("name", "kind"), [
        pytest.param(name, kind, marks=() if name in quick else pytest.mark.long)
        for name, kind in zip(names, itertools.cycle(KINDS), strict=False)])


def pretrained(name: str, kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    model = getattr(transformers, name)
    return Keeping(model(model.config_class(**ARCHITECTURES[name])), kind)


def last(out: Any) -> Tensor:
    """The logits of the last token."""
    f = out["logits"]
    return f[:, -1] if f.dim() == 3 else f


@pytest.mark.filterwarnings("ignore")
@each(ARCHITECTURES, QUICK)
def test_architectures_that_nobody_here_wrote(name: str, kind: str) -> None:
    """Weights, buffers, optimiser, random streams and what is kept after twenty steps, measured in several places."""
    def x() -> tuple[Any, Tensor]:
        y = torch.randint(0, 3, (6,))
        image = torch.randn(6, 2, 8, 8)
        return ({"pixel_values": image} if "Image" in name else {"input_ids": torch.randint(3, 23, (6, 5))}), y

    torch.manual_seed(5)
    probe = richter.Probe(*x(), kernel_examples=3)
    ends = [trained(lambda: pretrained(name, kind), 20, looks, x, probe, last) for looks in ((), (0, 7, 8, 19))]
    assert_same(ends[0][0], ends[1][0])
    assert ends[1][1] == 4


@each([name for name in CASES if not name.startswith("hf_")], ["mlp", "moe"])
def test_models_of_the_zoo(name: str, kind: str) -> None:
    case = CASES[name]
    inputs, y = case.batch(6)
    probe = richter.Probe(inputs, y, kernel_examples=4)
    ends = [trained(lambda: Keeping(case.build(), kind), 20, looks, lambda: (inputs, None), probe, case.output)
            for looks in ((), (0, 7, 8, 19))]
    assert_same(ends[0][0], ends[1][0])


# ------------------------------------------------------------------------------------- other places where things are kept


class InItsClass(nn.Module):
    calls, seen, ids = 0, [0.0], itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor) -> Tensor:
        type(self).calls += 1
        self.seen.append(1.0)
        value = self.calls + sum(self.seen) + next(self.ids)
        type(self).made = value
        return self.body(x) * (1.0 + 0.01 * np.tanh(value / 9) * self.training)


def test_what_is_kept_in_the_class() -> None:
    def run(looks: tuple[int, ...]) -> Any:
        InItsClass.calls, InItsClass.seen[:], InItsClass.ids = 0, [0.0], itertools.count()
        if hasattr(InItsClass, "made"):
            del InItsClass.made
        end = trained(InItsClass, 5, looks, lambda: batch("vector", 8, "cpu"), probe_of("vector"))[0]
        return {**end, "class": repr((InItsClass.calls, InItsClass.seen, InItsClass.ids, InItsClass.made))}

    seen, ids = InItsClass.seen, InItsClass.ids
    assert_same(run(()), run((0, 2)))
    assert InItsClass.seen is seen
    fresh_ids = InItsClass.ids = itertools.count(7)
    richter.measure(InItsClass(), probe_of("vector"), FEW)
    assert InItsClass.ids is fresh_ids
    assert next(fresh_ids) == 7
    assert ids is not fresh_ids


class Registering(nn.Module):
    """Its forward pass registers, makes and deletes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.once = mlp(), 1.0
        self.late: Any

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.ones(3))
            self.register_module("late", nn.Identity())
            self.made = [1.0]
            del self.once
            self.register_forward_hook(lambda *_: None)
        self.cache = self.cache * 1.01
        return self.body(x) * (self.cache.mean() if self.training else 1.0)


def test_what_a_forward_pass_registers() -> None:
    seed()
    model = Registering()
    with untouched(model):
        richter.measure(model, probe_of("vector"), FEW)
    assert hasattr(model, "once")
    assert not hasattr(model, "cache")
    assert "late" not in dict(model.named_modules())
    assert len(model._forward_hooks) == 0
    model(torch.ones(2, 5))
    with untouched(model):
        richter.measure(model, probe_of("vector"), FEW)


def test_an_exception_leaves_nothing_behind() -> None:
    """Also when the forward pass breaks off in the middle of its changes."""
    for kind in ("nested", "itertools.count", "cache", "slots", "array"):
        model = Keeping(nn.Sequential(mlp(), Fails()), kind)
        with untouched(model), pytest.raises(ZeroDivisionError):
            richter.measure(model, probe_of("vector"), FEW)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


@pytest.mark.parametrize("fails", [False, True], ids=["", "error"])
def test_hooks_are_removed_after_every_forward_pass(fails: bool) -> None:
    """Restoring the attributes would remove them too, but only at the end of the measurement. Until then, the hooks of earlier
    passes would run in every later pass."""
    model = nn.Sequential(mlp(), Fails() if fails else nn.Identity())
    own_hook = lambda *_: None  # noqa: E731
    model[1].register_forward_hook(own_hook)
    with quiet(model):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                forward(model, torch.ones(2, 5), state_of(model))
            hooks = [hook for module in model.modules() for box in (module._forward_pre_hooks, module._forward_hooks)
                     for hook in box.values()]
            assert hooks == [own_hook]


def used_up() -> Iterator[float]:
    yield from map(float, range(99))


@pytest.mark.parametrize("build", [used_up, lambda: itertools.cycle(used_up()), lambda: [used_up()], lambda: enumerate(used_up()),
                                   lambda: iter(torch.utils.data.DataLoader([1.0, 2.0, 3.0]))])
def test_what_can_only_be_used_up_is_not(build: Callable[[], Any]) -> None:
    """A generator is not moved on: a forward pass that tries is refused, with the reason; one that does not is measured."""
    seed()
    model = Keeping(mlp(), "itertools.count")
    model.state, model.step = build(), lambda it: 0.0
    before = model.state
    richter.measure(model, probe_of("vector"), FEW)
    model.step = lambda it: 1.0 if next(it[0] if isinstance(it, list) else it) is None else 0.0
    with pytest.raises(CaptureError, match=r"advances a .* that the model keeps.*nothing was taken"):
        richter.measure(model, probe_of("vector"), FEW)
    assert model.state is before
    value = next(before[0] if isinstance(before, list) else before)
    assert float(value[1] if isinstance(value, tuple) else value) in (0.0, 1.0)  # its first one


def test_a_state_that_takes_part_in_the_graph() -> None:
    """Written into without no_grad, a plain tensor becomes part of the graph; afterwards it is none."""
    model = Keeping(mlp(), "tensor")
    model.step = lambda t: t.add_(model.body[0].weight.mean()) is None or 0.0
    with untouched(model):
        richter.measure(model, probe_of("vector"), FEW)
    assert model.state.grad_fn is None
    assert model.state.is_leaf


def test_a_tensor_that_is_given_other_memory() -> None:
    model = Keeping(mlp(), "tensor")

    def step(t: Tensor) -> float:
        t.data = torch.ones(5)
        return 0.0

    model.step, place = step, model.state.data_ptr()
    with untouched(model):
        richter.measure(model, probe_of("vector"), FEW)
    assert model.state.data_ptr() == place


class Collected(nn.Module):
    """The head reads what a hook has collected, as in timm's FeatureHookNet. A copy of ``features`` would stay as it is."""

    def __init__(self, by_closure: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.features = features = {"h": torch.zeros(8, 8)}
        self.hook = self.body.register_forward_hook(
            (lambda _, x, h: features.update(h=h)) if by_closure else functools.partial(collect, features))

    def forward(self, x: Tensor) -> Tensor:
        self.body(x)
        return self.head(self.features["h"].tanh())


def collect(features: dict[str, Tensor], _: nn.Module, x: Any, h: Tensor) -> None:
    features["h"] = h


@pytest.mark.parametrize("by_closure", [False, True], ids=["argument", "closure"])
def test_a_hook_and_the_forward_pass_share_an_attribute(by_closure: bool) -> None:
    model = Collected(by_closure)
    x = torch.randn(8, 5, generator=torch.Generator().manual_seed(1))
    with untouched(model):
        K = richter.kernels.ntk(model, x)
    model.hook.remove()
    torch.testing.assert_close(K, richter.kernels.ntk(nn.Sequential(model.body, nn.Tanh(), model.head), x))


# ---------------------------------------------------------------------------------------------------------------- sizes


def test_a_large_data_set_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a container is, as many objects are looked into; of the others the container itself is put back."""
    model = Keeping(mlp(), "tensor")
    model.data = [(i, [i]) for i in range(100_000)]
    model.numbers, model.last = list(range(100_000)), [[0]]
    memory = remembered.Memory(model)
    assert len(memory.kept) < 2 * remembered.VISITS

    def step(_: Any) -> float:
        model.last[0].append(1)
        model.data.append((0, [0]))
        model.numbers[-1] = -1
        return 0.0

    model.step = step
    with untouched(nn.Sequential(model.body)):
        richter.measure(model, probe_of("vector"), FEW)
    assert model.last == [[0]]
    assert len(model.data) == len(model.numbers) == model.numbers[-1] + 1 == 100_000


def test_what_is_too_large_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A large array cannot be written into meanwhile; of a large tensor it is said that it was."""
    monkeypatch.setattr(remembered.CopyBudget.__init__, "__defaults__", (8,))
    model = Keeping(mlp(), "array")
    with untouched(model), pytest.raises(ValueError, match="read-only"):
        richter.measure(model, probe_of("vector"), FEW)
    model = Keeping(mlp(), "tensor")
    with pytest.raises(CaptureError, match=r"a tensor of shape \[3\].*cannot be put back.*too large"):
        richter.measure(model, probe_of("vector"), FEW)


# -------------------------------------------------------------------------------------------- weights, buffers, gradients


class Culprit(nn.Module):
    """Does something to the real weights of the model in its forward pass, through a reference that nobody replaces."""

    def __init__(self, act: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
        self.act, self.real = act, (self.body[0].weight, self.body[1].running_mean)

    def forward(self, x: Tensor) -> Tensor:
        self.act(self)
        return self.body(x)


def scale_data(m: Any) -> None:
    m.real[0].data.mul_(1.5)


def replace_data(m: Any) -> None:
    m.real[0].data = torch.zeros(8, 5)


def shift_buffer(m: Any) -> None:
    m.real[1].add_(1.0)


def accumulate(m: Any) -> None:
    m.real[0].square().sum().backward()


def replace_grad(m: Any) -> None:
    m.real[0].grad = torch.ones(8, 5)


ACTS = {scale_data: "parameter 'body.0.weight' changed", replace_data: "parameter 'body.0.weight' changed",
        shift_buffer: "buffer 'body.1.running_mean' changed", accumulate: ".grad of parameter 'body.0.weight' changed",
        replace_grad: ".grad of parameter 'body.0.weight' changed"}  # fmt: skip


@pytest.mark.parametrize("graded", [False, True], ids=["no gradients", "gradients"])
@pytest.mark.parametrize("act", ACTS)
def test_what_is_written_into_the_model_is_put_back_and_said(act: Callable[[Any], None], graded: bool) -> None:
    seed()
    model = Culprit(act)
    optimiser = optimisers(model, "sgd")
    if graded:
        model.body(torch.ones(4, 5)).square().sum().backward()
    before, held = fingerprint(model, optimiser), held_objects(model)
    with pytest.raises(CaptureError, match=f"{ACTS[act]} while the model was measured.*It was put back"):
        richter.measure(model, probe_of("vector"), FEW)
    assert_same(before, fingerprint(model, optimiser))
    now = held_objects(model)
    assert [k for k in held if held[k] is not now[k] and held[k] != now[k]] == []


def test_what_is_written_behind_a_forward_pass_is_put_back() -> None:
    """The forward pass itself is refused then."""
    def scale(m: Any) -> None:
        with torch.no_grad():
            m.real[0].mul_(1.5)

    model = Culprit(scale)
    before, version = model.body[0].weight.detach().clone(), model.body[0].weight._version
    with pytest.raises(CaptureError) as caught:
        richter.measure(model, probe_of("vector"), FEW)
    assert any("parameter 'body.0.weight' changed" in note for note in caught.value.__notes__)
    assert torch.equal(model.body[0].weight, before)
    assert model.body[0].weight._version == version


def test_an_error_on_its_way_is_not_hidden() -> None:
    model = Culprit(lambda m: accumulate(m) or 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        richter.measure(model, probe_of("vector"), FEW)
    assert any("the .grad of parameter 'body.0.weight' changed" in note for note in caught.value.__notes__)
    assert model.body[0].weight.grad is None


def test_a_model_too_large_to_be_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "BACKUP_BYTES", 8)
    model = Culprit(shift_buffer)
    with pytest.raises(CaptureError, match=r"'body.1.running_mean' changed.*could not be put back: the model is too large"):
        richter.measure(model, probe_of("vector"), FEW)
    model = Culprit(accumulate)
    with pytest.raises(CaptureError, match=r".grad of parameter 'body.0.weight' changed.*It was put back"):
        richter.measure(model, probe_of("vector"), FEW)  # there was none before: no copy is needed
    assert model.body[0].weight.grad is None


def test_odd_weights_are_left_alone() -> None:
    """Sparse gradients, frozen and whole-number parameters, weights that contain NaN, inference tensors, ties."""
    model = nn.Sequential(nn.Embedding(7, 5, sparse=True), nn.Flatten(), nn.Linear(20, 3))
    model[2].bias.requires_grad_(False)
    model.register_parameter("whole", nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_buffer("nan", torch.tensor([float("nan"), -0.0]))
    model.register_buffer("sparse", torch.eye(3).to_sparse())
    with torch.inference_mode():
        model.register_buffer("inferred", torch.ones(3))
    model(torch.zeros(2, 4, dtype=torch.long)).sum().backward()
    assert model[0].weight.grad.is_sparse
    grad = model[0].weight.grad
    before = grad.to_dense()
    with quiet(model):
        pass
    assert model[0].weight.grad is grad
    with pytest.raises(CaptureError, match=r"the .grad of parameter '0.weight'"), quiet(model):
        model[0].weight.grad.mul_(2.0)
    assert model[0].weight.grad is grad
    assert torch.equal(grad.to_dense(), before)


def test_a_measurement_inside_a_measurement() -> None:
    model = Keeping(mlp(), "itertools.count")
    with untouched(model), quiet(model), quiet(model, "train"):
        model(torch.ones(2, 5))
    with untouched(model), quiet(model):
        with untouched(model):
            richter.measure(model, probe_of("vector"), FEW)
        next(model.state)
    assert next(model.state) == 3


def test_a_copy_made_meanwhile_is_a_whole_model() -> None:
    model = mlp()
    with quiet(model):
        twin = copy.deepcopy(model)
    x = torch.ones(2, 5)
    assert torch.equal(twin(x), model(x))
    assert not any(module._forward_pre_hooks for module in twin.modules())
