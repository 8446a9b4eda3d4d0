"""Small models with the awkward features of large ones, for tests over every kind of layer.

Each `Case` says how to build a model, how to draw a batch and which weight matrices it has. Models are float64, in eval
mode, seeded without touching the global generators, and map every example on its own: f(x)[i] == f(x[i:i+1]).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.func import functional_call

Inputs = Any  # a tensor, a tuple or a dict of tensors, examples first
Result = Any  # what a model returns
Batch = Callable[[int], tuple[Any, Tensor]]


@dataclass(frozen=True)
class Case:
    """A model, its data and the linear maps z = W h it is made of.

    `maps`: name -> "dense" | "grouped" | "lookup". A name is that of `named_modules()`, with ".q", ".k", ".v" behind it
    for a fused projection and for nn.MultiheadAttention, or a parameter's own name if no module owns the product.
    `unmapped`: names of the other parameters with at least two axes longer than one.
    """

    name: str
    build: Callable[..., nn.Module]  # build(seed=0)
    batch: Batch  # n -> (x, y); the first examples of a larger batch are those of a smaller one
    maps: dict[str, str] = field(default_factory=dict)
    unmapped: frozenset[str] = frozenset()
    output: Callable[[Any], Tensor] | None = None


def call(model: nn.Module, x: Inputs) -> Result:
    """model(x), model(*x) for a tuple, model(**x) for a dict."""
    if isinstance(x, dict):
        return model(**x)
    return model(*x) if isinstance(x, tuple) else model(x)


def select(x: Inputs, index: slice | Tensor) -> Inputs:
    """The examples `index` of a batch that is a tensor, a tuple or a dict."""
    if isinstance(x, dict):
        return {key: value[index] for key, value in x.items()}
    return tuple(value[index] for value in x) if isinstance(x, tuple) else x[index]


def initial(case: Case) -> dict[str, Tensor]:
    """Another state of the same architecture, to play the role of the initial weights."""
    return {key: value.detach().clone() for key, value in case.build(seed=1).state_dict().items()}


# ---------------------------------------------------------------------------------------------------- building blocks


def seeded(factory: Callable[[], nn.Module], gain: float = 1.0) -> Callable[..., nn.Module]:
    """build(seed=0): the module in float64 and eval mode, with no bias, scale or running statistic at its default.

    Matrices are multiplied by `gain`: torch's own initialisation makes deep small nets almost constant.
    """

    def build(seed: int = 0) -> nn.Module:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(1234 + seed)
            model = factory().double()
            with torch.no_grad():
                for p in model.parameters():
                    if p.ndim <= 1:
                        p.add_(0.3 * torch.randn(p.shape, dtype=p.dtype))
                    else:
                        p.mul_(gain)
                for name, b in model.named_buffers():
                    if name.endswith("running_mean"):
                        b.copy_(0.3 * torch.randn(b.shape))
                    elif name.endswith("running_var"):
                        b.copy_(0.5 + torch.rand(b.shape))
        return model.eval()

    return build


def normal(i: int, *shape: int, stream: int = 0) -> Tensor:
    """Standard normal numbers of example i."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * stream + i), dtype=torch.float64)


def tokens(i: int, length: int, low: int, high: int, stream: int = 0) -> Tensor:
    """Token ids in [low, high) of example i."""
    return torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(1000 * stream + i))


def classes(n: int, k: int) -> Tensor:
    """Class ids 0, 1, ..., k-1, 0, 1, ..."""
    return torch.arange(n) % k


def gaussian(*shape: int, k: int = 3) -> Batch:
    """x[n, *shape] normal, y[n] one of k classes."""
    return lambda n: (torch.stack([normal(i, *shape) for i in range(n)]), classes(n, k))


def kinds(dense: Iterable[str] | str, grouped: str = "", lookup: str = "") -> dict[str, str]:
    """{name: kind} from names by kind; a string is split at spaces."""
    named = {"dense": dense, "grouped": grouped, "lookup": lookup}
    return {n: kind for kind, names in named.items() for n in (names.split() if isinstance(names, str) else names)}


def below(prefix: str, names: str) -> list[str]:
    """'prefix.name' for each name."""
    return [f"{prefix}.{name}" for name in names.split()]


# ------------------------------------------------------------------------------------------------------ perceptrons


def mlp() -> nn.Sequential:
    """An in-place ReLU overwrites what the layer before it returned."""
    return nn.Sequential(
        nn.Linear(5, 8), nn.ReLU(inplace=True), nn.Linear(8, 6), nn.ReLU(inplace=True), nn.Linear(6, 3)
    )


def mlp_nobias() -> nn.Module:
    """W3 tanh(W2 tanh(W1 x)), one output."""
    return nn.Sequential(
        nn.Linear(5, 8, bias=False), nn.Tanh(), nn.Linear(8, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False)
    )


def regression(n: int) -> tuple[Tensor, Tensor]:
    """x[n,5], y[n,1] = x_0 x_1 + x_2."""
    x = torch.stack([normal(i, 5) for i in range(n)])
    return x, (x[:, 0] * x[:, 1] + x[:, 2])[:, None]


class Twice(nn.Module):
    """One layer applied twice in a row and once more elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(5, 5)
        self.other = nn.Linear(5, 5)
        self.readout = nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh(self.shared(torch.tanh(self.shared(x))))
        b = torch.tanh(self.shared(torch.tanh(self.other(x))))
        return self.readout(torch.cat([a, b], -1))


class Tied(nn.Module):
    """Two modules, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.readout = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.second(torch.tanh(self.first(x)))))


class TiedAutoencoder(nn.Module):
    """f(x) = W^T tanh(W x + b) + c: the second use of W is outside its module."""

    def __init__(self) -> None:
        super().__init__()
        self.enc = nn.Linear(5, 4)
        self.shift = nn.Parameter(torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(self.enc(x)), self.enc.weight.t(), self.shift)


def autoencoding(n: int) -> tuple[Tensor, Tensor]:
    """x[n,5], y = x."""
    x = torch.stack([normal(i, 5) for i in range(n)])
    return x, x.clone()


class Raw(nn.Module):
    """Parameters without modules: x @ W, F.linear, einsum, an elementwise gain, a temperature and an added token."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 5))
        self.block = nn.ParameterDict({"proj": nn.Parameter(torch.randn(5, 6) / math.sqrt(5))})
        self.gain = nn.Parameter(torch.ones(6))
        self.mix = nn.Parameter(torch.randn(4, 6) / math.sqrt(6))
        self.head = nn.Parameter(torch.randn(4, 3) / math.sqrt(4))
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        a = torch.tanh((x + self.token) @ self.block["proj"]) * self.gain
        b = torch.tanh(F.linear(a, self.mix))
        return torch.einsum("nd,do->no", b, self.head) / self.temperature


def parametrized() -> nn.Module:
    """W = g v / |v| by rows, W = V / |V|_2, W orthogonal, W free."""
    p = torch.nn.utils.parametrizations
    return nn.Sequential(
        p.weight_norm(nn.Linear(5, 8)), nn.Tanh(), p.spectral_norm(nn.Linear(8, 6)), nn.Tanh(),
        p.orthogonal(nn.Linear(6, 6)), nn.Tanh(), nn.Linear(6, 3),
    )  # fmt: skip


def old_weight_norm() -> nn.Module:
    """Here `weight` is a plain tensor, rebuilt from weight_g and weight_v before each forward."""
    norm = torch.nn.utils.weight_norm
    return nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), norm(nn.Linear(8, 6)), nn.Tanh(), nn.Linear(6, 3))


class Checkpointed(nn.Module):
    """Blocks recomputed in the backward pass, in both of torch's ways."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.first = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.Linear(8, 6))
        self.second = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 6))
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.embed(x)
        z = z + torch.utils.checkpoint.checkpoint(self.first, z, use_reentrant=False)
        z = z + torch.utils.checkpoint.checkpoint(self.second, z, use_reentrant=True)
        return self.readout(torch.tanh(z))


class InplaceView(nn.Module):
    """What a layer returned is changed in place through a slice and through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.second = nn.Linear(8, 6)
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = self.first(x)
        z[:, :3].mul_(0.5)
        z.view(-1, 2, 4).relu_()
        u = self.second(z).reshape(-1, 3, 2)
        u[:, 1].mul_(-2.0)
        u.relu_()
        return self.readout(u.flatten(1))


class Folded(nn.Module):
    """[n,T,d] -> [n T,d] before the layers, and back."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.second = nn.Linear(6, 5)
        self.readout = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        n, T, d = x.shape
        z = torch.tanh(self.first(x.reshape(n * T, d)))
        z = torch.tanh(self.second(z)).reshape(n, T, -1)
        return self.readout(z.mean(1))


class MultiInput(nn.Module):
    """forward(a, b)."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 6)
        self.right = nn.Linear(3, 6)
        self.readout = nn.Linear(6, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.left(a)) * torch.tanh(self.right(b)))


class DictIO(MultiInput):
    """forward(a=, b=) -> {"logits", "aux"}."""

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        return {"aux": a.mean(-1), "logits": super().forward(a, b)}


def pairs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(a[n,5], b[n,3]), y[n]."""
    a, b = zip(*[(normal(i, 5), normal(i, 3, stream=1)) for i in range(n)], strict=True)
    return (torch.stack(a), torch.stack(b)), classes(n, 3)


def pairs_as_dict(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """{"a": a[n,5], "b": b[n,3]}, y[n]."""
    (a, b), y = pairs(n)
    return {"a": a, "b": b}, y


class TupleOut(nn.Module):
    """Returns (out, hidden)."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = torch.tanh(self.first(x))
        return self.readout(z), z


class MixtureOfExperts(nn.Module):
    """Token t goes to expert [x_t0 > 0]; the gate's softmax weighs what comes back. Some examples use one only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 5)
        self.gate = nn.Linear(5, 2)
        self.experts = nn.ModuleList([nn.Linear(5, 6), nn.Linear(5, 6)])
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.embed(x))
        weight = self.gate(z).softmax(-1)
        choice = (x[..., 0] > 0).long()
        mixed = z.new_zeros(*z.shape[:-1], 6)
        for e, expert in enumerate(self.experts):
            rows = choice == e
            mixed[rows] = weight[rows][:, e, None] * torch.tanh(expert(z[rows]))
        return self.readout(mixed.mean(1))


def routed(n: int) -> tuple[Tensor, Tensor]:
    """x[n,3,4] with x_t0 > 0 for i mod 4 tokens of example i."""
    x, y = gaussian(3, 4)(n)
    i, t = torch.arange(n)[:, None], torch.arange(3)
    x[..., 0] = x[..., 0].abs() * torch.where((t + i) % 3 < i % 4, 1.0, -1.0)
    return x, y


class Recurrent(nn.Module):
    """An LSTM read at its last step: its matrices act inside one fused call."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.readout = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.lstm(x)[0][:, -1])


class DeepRecurrent(nn.Module):
    """Two layers in both directions with projected states, steps first; read at every step and at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, num_layers=2, bidirectional=True, proj_size=1, dropout=0.3)
        self.readout = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        z, (h, c) = self.lstm(x.transpose(0, 1))
        return self.readout(z.mean(0)) + h.sum((0, 2))[:, None] + c.mean((0, 2))[:, None]


class Gated(nn.Module):
    """Two layers of gated units without biases, from a state that depends on the example; then an RNN with ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Linear(3, 4)
        self.gru = nn.GRU(3, 4, num_layers=2, bias=False, batch_first=True)
        self.rnn = nn.RNN(4, 3, nonlinearity="relu", bidirectional=True, batch_first=True)
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        z, _ = self.gru(x, torch.stack([self.start(x[:, 0])] * 2))
        return self.readout(self.rnn(z)[0].mean(1))


class Cells(nn.Module):
    """Cells that the model itself calls step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(3, 4), nn.GRUCell(4, 3), nn.RNNCell(3, 4)
        self.readout = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        state, u, z = None, None, None
        for t in range(x.shape[1]):
            state = self.lstm(x[:, t], state)
            u = self.gru(state[0], u)
            z = self.rnn(u, z)
        return self.readout(z)


class Packed(nn.Module):
    """Sequences of unequal lengths, packed: examples lie in the order of their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 4, bidirectional=True, batch_first=True)
        self.readout = nn.Linear(8, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        z, h = self.gru(packed)
        z, _ = nn.utils.rnn.pad_packed_sequence(z, batch_first=True)
        return self.readout(torch.tanh(h.transpose(0, 1).flatten(1)) + z.sum(1))


def of_lengths(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """(x[n,4,3], lengths[n] = 2, 4, 3, 1, 2, ...), y[n]."""
    x, y = gaussian(4, 3)(n)
    return (x, torch.tensor([2, 4, 3, 1])[torch.arange(n) % 4]), y


class Upsampler(nn.Module):
    """Transposed convolutions: strided, cropped, grouped, dilated, overlapping or with gaps between the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose2d(2, 4, 3, stride=2, padding=1, output_padding=1)
        self.second = nn.ConvTranspose2d(4, 6, (2, 3), padding=(0, 1), dilation=2, groups=2)
        self.third = nn.ConvTranspose2d(6, 2, 1, stride=2)
        self.readout = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.readout(torch.tanh(self.third(z)).square().mean((2, 3)))


def conv_transpose13() -> nn.Module:
    """Along one axis, in two groups; then along three."""
    return nn.Sequential(
        nn.ConvTranspose1d(4, 6, 4, stride=3, padding=2, output_padding=2, groups=2, bias=False), nn.Tanh(),
        nn.Unflatten(2, (2, 2, 2)), nn.ConvTranspose3d(6, 2, (1, 2, 2), stride=(1, 2, 1), padding=(0, 0, 1)), nn.Tanh(),
        nn.Flatten(), nn.Linear(16, 3),
    )  # fmt: skip


class Pairing(nn.Module):
    """Products of two inputs, at one position and at several."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Bilinear(5, 3, 4)
        self.again = nn.Bilinear(2, 2, 3, bias=False)
        self.readout = nn.Linear(3, 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        z = torch.tanh(self.pair(a, b)).unflatten(-1, (2, 2))
        return self.readout(torch.tanh(self.again(z, input2=z.flip(-1))).sum(1))


class Bags(nn.Module):
    """Bags of words: mean without padding, weighted sum, maximum."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.EmbeddingBag(7, 4, mode="mean", padding_idx=0)
        self.sum = nn.EmbeddingBag(7, 4, mode="sum")
        self.max = nn.EmbeddingBag(7, 4, mode="max", padding_idx=0)
        self.readout = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        weights = torch.arange(1, 6, dtype=torch.float64, device=ids.device).expand(ids.shape) / 5
        return self.readout(torch.tanh(self.mean(ids)) + torch.tanh(self.sum(ids, None, weights)) * self.max(ids))


def gated(name: str, gates: str, sides: str = "ih hh") -> list[str]:
    """'name.ih.i' for each weight and gate; gates without names: 'name.ih'."""
    return [f"{name}.{side}.{gate}" if gate else f"{name}.{side}" for side in sides.split() for gate in gates or ("",)]


LSTM_SIDES = [f"{k}_l{i}{side}" for i in (0, 1) for side in ("", "_reverse") for k in ("ih", "hh")]


def frozen() -> nn.Module:
    """A layer that is not trained still has a weight, an input and a gradient asked of it."""
    model = mlp()
    model[0].requires_grad_(False)
    return model


class Unused(nn.Module):
    """`spare` is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.spare = nn.Linear(6, 6)
        self.readout = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.first(x)))


# ------------------------------------------------------------------------------------------------------ convolutions


def cnn() -> nn.Module:
    """Strided, grouped, dilated and depthwise convolutions between batch norms."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, (3, 2), padding=(1, 2), groups=2), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 2, dilation=2, padding=1), nn.ReLU(inplace=True),
        nn.Conv2d(4, 8, 3, padding=1, groups=4), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(48, 3),
    )  # fmt: skip


def cnn_modes() -> nn.Module:
    """Every kind of padding, kernels of unequal and even sides."""
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=2, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(3, 3, (1, 3), padding=(0, 1), padding_mode="circular"), nn.Tanh(),
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=1, padding_mode="replicate"), nn.Tanh(),
        nn.Conv2d(4, 3, (2, 3), padding="same"), nn.Tanh(),
        nn.Conv2d(3, 2, (2, 4), padding="same", padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(2, 3, 2, padding="valid"), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


def conv1d() -> nn.Module:
    """Strided, then dilated in two groups."""
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, stride=2, padding=1), nn.ReLU(inplace=True), nn.Conv1d(4, 6, 2, dilation=2, groups=2),
        nn.BatchNorm1d(6), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3),
    )  # fmt: skip


def conv3d() -> nn.Module:
    """Unequal kernel, stride and padding along the three axes."""
    return nn.Sequential(
        nn.Conv3d(1, 4, (2, 3, 2), stride=(1, 2, 1), padding=(0, 1, 1)), nn.Tanh(),
        nn.Conv3d(4, 4, 2, groups=2, dilation=(1, 1, 2)), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 3),
    )  # fmt: skip


def groupnorm() -> nn.Module:
    """Norms that mix positions and channels of one example."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3, stride=2),
        nn.GroupNorm(1, 4), nn.ReLU(inplace=True), nn.Flatten(), nn.LayerNorm(16), nn.Linear(16, 3),
    )  # fmt: skip


class Residual(nn.Module):
    """relu(x + BN(conv(relu(BN(conv(x)))))), sum and ReLU in place."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential()
        if stride > 1 or c_in != c_out:
            self.downsample = nn.Sequential(nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out))

    def forward(self, x: Tensor) -> Tensor:
        z = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        z += self.downsample(x)
        return self.relu(z)


class ResNet(nn.Module):
    """A stem, two residual blocks and a read-out of the mean over pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 3, 3, 1, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU(inplace=True))
        self.layer1 = Residual(3, 3, 1)
        self.layer2 = Residual(3, 4, 2)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


# ------------------------------------------------------------------------------------------------------ transformers


class CausalSelfAttention(nn.Module):
    """softmax(q k^T / sqrt(d_head)) v under a causal mask; q, k, v from one matrix."""

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.c_attn = nn.Linear(d, 3 * d)
        self.c_proj = nn.Linear(d, d)
        self.resid_dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        n, T, d = x.shape
        q, k, v = (u.view(n, T, self.heads, -1).transpose(1, 2) for u in self.c_attn(x).split(d, dim=2))
        p = self.dropout if self.training else 0.0
        z = F.scaled_dot_product_attention(q, k, v, dropout_p=p, is_causal=True)
        return self.resid_dropout(self.c_proj(z.transpose(1, 2).reshape(n, T, d)))


class FeedForward(nn.Module):
    """W2 gelu(W1 x)."""

    def __init__(self, d: int, dropout: float) -> None:
        super().__init__()
        self.c_fc = nn.Linear(d, 4 * d)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed-forward(norm(x))."""

    def __init__(self, d: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(d)
        self.attn = CausalSelfAttention(d, heads, dropout)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = FeedForward(d, dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's names; lm_head shares its weight with wte; wpe is looked up once for the whole batch."""

    def __init__(self, vocabulary: int = 7, length: int = 4, d: int = 6, layers: int = 2, dropout: float = 0.1) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, d),
                "wpe": nn.Embedding(length, d),
                "drop": nn.Dropout(dropout),
                "h": nn.ModuleList([Block(d, 2, dropout) for _ in range(layers)]),
                "ln_f": nn.LayerNorm(d),
            }
        )
        self.lm_head = nn.Linear(d, vocabulary, bias=False)
        self.transformer["wte"].weight = self.lm_head.weight

    def forward(self, ids: Tensor) -> Tensor:
        t = self.transformer
        x = t["drop"](t["wte"](ids) + t["wpe"](torch.arange(ids.shape[1], device=ids.device)))
        for block in t["h"].children():
            x = block(x)
        return self.lm_head(t["ln_f"](x))


def language(n: int, vocabulary: int = 7, length: int = 4) -> tuple[Tensor, Tensor]:
    """ids[n,T] and the next ids[n,T]."""
    ids = torch.stack([tokens(i, length + 1, 0, vocabulary) for i in range(n)])
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


GPT_BLOCK = "attn.c_attn.q attn.c_attn.k attn.c_attn.v attn.c_proj mlp.c_fc mlp.c_proj"
GPT_MAPS = kinds(
    dense=[*below("transformer.h.0", GPT_BLOCK), *below("transformer.h.1", GPT_BLOCK), "lm_head"],
    lookup="transformer.wte transformer.wpe",
)


class Encoder(nn.Module):
    """nn.TransformerEncoder between an input layer and a read-out of the mean over tokens."""

    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(3, 4)
        layer = nn.TransformerEncoderLayer(4, 2, dim_feedforward=6, dropout=0.1, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.readout = nn.Linear(4, 3)
        for p in self.encoder.parameters():  # the layers start as copies of one another
            if p.ndim > 1:
                nn.init.normal_(p, std=0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        return self.readout(self.encoder(self.embed(x)).mean(1 if self.batch_first else 0))


MHA = "q k v out_proj"
ENCODER_MAPS = kinds(
    [
        "embed",
        *(f"encoder.layers.{i}.{name}" for i in range(2) for name in [*below("self_attn", MHA), "linear1", "linear2"]),
        "readout",
    ]
)


class CrossAttention(nn.Module):
    """Queries, keys and values of three widths: three separate matrices; one learned key and value more."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True, batch_first=True)
        self.readout = nn.Linear(4, 3)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.attn(query, key, value, need_weights=False)[0]).mean(1))


def attention_inputs(n: int) -> tuple[tuple[Tensor, ...], Tensor]:
    """(query[n,3,4], key[n,5,3], value[n,5,5]), y[n]."""
    shapes = ((3, 4), (5, 3), (5, 5))
    x = tuple(torch.stack([normal(i, *shape, stream=j) for i in range(n)]) for j, shape in enumerate(shapes))
    return x, classes(n, 3)


class BagOfWords(nn.Module):
    """The mean over all tokens, padding included: the row of the padding token is zero and gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5, padding_idx=0)
        self.hidden = nn.Linear(5, 6)
        self.readout = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.readout(torch.tanh(self.hidden(self.embedding(ids).mean(1))))


def padded_words(n: int, length: int = 5) -> tuple[Tensor, Tensor]:
    """ids[n,5], example i ending in i mod 3 padding tokens 0."""
    ids = torch.stack([tokens(i, length, 1, 7) for i in range(n)])
    ids[torch.arange(length)[None] >= length - classes(n, 3)[:, None]] = 0
    return ids, classes(n, 3)


# ------------------------------------------------------------------------------------------------------ Hugging Face


def hf_gpt2() -> nn.Module:
    """GPT-2: its Conv1D keeps weights as [d_in,d_out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=7, n_positions=8, initializer_range=0.4,
                        use_cache=False, bos_token_id=0, eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config)


def hf_language(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """{"input_ids": ids[n,T]} and the next ids[n,T]."""
    ids, y = language(n)
    return {"input_ids": ids}, y


def hf_vit() -> nn.Module:
    """A vision transformer over four patches and a class token."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12, image_size=8,
                       patch_size=4, num_channels=2, num_labels=3, initializer_range=0.4)  # fmt: skip
    return ViTForImageClassification(config)


def hf_resnet() -> nn.Module:
    """A residual network of three basic blocks."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(num_channels=2, embedding_size=4, hidden_sizes=[4, 6], depths=[1, 2], layer_type="basic",
                          num_labels=3)  # fmt: skip
    return ResNetForImageClassification(config)


def hf_images(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """{"pixel_values": x[n,2,8,8]}, y[n]."""
    x, y = gaussian(2, 8, 8)(n)
    return {"pixel_values": x}, y


def hf_bert() -> nn.Module:
    """A text classifier that reads its first token."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(vocab_size=7, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
                        max_position_embeddings=6, num_labels=3, initializer_range=0.4)  # fmt: skip
    return BertForSequenceClassification(config)


def hf_sentences(n: int) -> tuple[dict[str, Tensor], Tensor]:
    """{"input_ids", "attention_mask"} [n,5] with padding at the end, y[n]."""
    ids, y = padded_words(n)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}, y


VIT_BLOCK = "attention.q_proj attention.k_proj attention.v_proj attention.o_proj mlp.fc1 mlp.fc2"
HF_RESNET_BLOCK = "layer.0.convolution layer.1.convolution"
BERT_BLOCK = "attention.self.query attention.self.key attention.self.value attention.output.dense "
BERT_BLOCK += "intermediate.dense output.dense"


def logits(result: Result) -> Tensor:
    """The entry "logits" of a dict or ModelOutput."""
    return result["logits"]


def first(result: Result) -> Tensor:
    """The first of several results."""
    return result[0]


# ------------------------------------------------------------------------------------------------ parameters as matrices


class Told(nn.Module):
    """A model that tells an oracle what each of its maps reads and writes, because no module or name could."""

    listener: Callable[[str, Tensor, Tensor, Tensor], Tensor] | None = None  # (map, W, h, z) -> z

    def told(self, name: str, W: Tensor, h: Tensor, z: Tensor) -> Tensor:
        """z[..., d_out] = W[d_out,d_in] h[..., d_in]."""
        return z if self.listener is None else self.listener(name, W, h, z)


def matrix(*shape: int) -> nn.Parameter:
    """Normal entries, by the square root of the last length."""
    return nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1]))


class BothWays(Told):
    """W as it is and transposed, as a raw parameter and as the weight of a module without a view."""

    def __init__(self, d: int = 4) -> None:
        super().__init__()
        self.W = matrix(5, d)
        self.inner = nn.Module()
        self.inner.weight = matrix(5, 6)
        self.conv = hf_conv1d(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        W, V, C = self.W, self.inner.weight, self.conv.weight
        a = torch.tanh(self.told("W", W.T, x, x @ W))
        b = torch.tanh(self.told("W.T", W, a, a @ W.T))
        c = torch.tanh(self.told("inner", V.T, b, b @ V))
        e = torch.tanh(self.told("inner.T", V, c, F.linear(c, V)))
        g = torch.tanh(self.told("conv", C.T, e, self.conv(e)))
        return self.told("conv.T", C, g, F.linear(g, C))


class Containers(Told):
    """Parameters and modules through what torch's containers make anew in a forward pass: slices, copies and unions, and a
    functional call. What is wrapped in a new Parameter there (a buffer) is a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList([matrix(6, 5), matrix(6, 6), matrix(5, 6)])
        self.named = nn.ParameterDict({"a": matrix(6, 5), "b": matrix(5, 6)})
        self.layers = nn.ModuleList([nn.Linear(5, 6), nn.Linear(6, 4), nn.Linear(4, 4)])
        self.heads = nn.ModuleDict({"one": nn.Linear(4, 3), "two": nn.Linear(4, 3)})
        self.register_buffer("shift", torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor) -> Tensor:
        for i, W in enumerate(self.w[:2]):
            x = torch.tanh(self.told(f"w.{i}", W, x, x @ W.T))
        [W] = nn.ParameterList(list(self.w)[2:])
        x = torch.tanh(self.told("w.2", W, x, F.linear(x, W)))
        both = (self.named | nn.ParameterDict()).copy()
        A, B = both["a"], self.named.get("b")
        x = torch.tanh(self.told("named.a", A, x, x @ A.T))
        x = torch.tanh(self.told("named.b", B, x, x @ B.T))
        for k, layer in enumerate(self.layers[:2]):
            x = torch.tanh(self.told(f"layers.{k}", layer.weight, x, layer(x)))
        last = self.layers[-1]
        x = torch.tanh(self.told("layers.2", last.weight, x, functional_call(last, dict(last.named_parameters()), (x,))))
        x = x + nn.Parameter(self.shift)
        return torch.stack([self.told(f"heads.{k}", head.weight, x, head(x)) for k, head in self.heads.items()]).sum(0)


def hf_conv1d(d_out: int, d_in: int) -> nn.Module:
    """GPT-2's Linear, which keeps its weight as [d_in,d_out]; square, so that both ways fit."""
    from transformers.pytorch_utils import Conv1D

    module = Conv1D(d_out, d_in)
    nn.init.normal_(module.weight, std=0.5)
    return module


class EveryProduct(Told):
    """The weight on the left, by keyword, in every function that multiplies."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"left": (6, 5), "swapped": (6, 6), "keyword": (5, 6), "dots": (5, 4), "added": (4, 4), "heads": (3, 4, 2),
                  "merge": (3, 2, 5), "inner": (4, 5), "vector": (4,), "inside": (4, 4)}
        for name, shape in shapes.items():
            setattr(self, name, matrix(*shape))

    def forward(self, x: Tensor) -> Tensor:
        W = self.left
        z = torch.tanh(self.told("left", W, x, (W @ x.mT).mT))
        z = torch.tanh(self.told("swapped", self.swapped, z, torch.einsum("od,ntd->nto", self.swapped, z)))
        z = torch.tanh(self.told("keyword", self.keyword, z, F.linear(weight=self.keyword, input=z)))
        z = torch.tanh(self.told("dots", self.dots.mT, z, torch.tensordot(z, self.dots, dims=([2], [0]))))
        rows = z.flatten(0, 1)
        z = torch.tanh(self.told("added", self.added.t(), rows, torch.addmm(rows, mat1=rows, mat2=self.added))).view(z.shape)
        h, d, k = self.heads.shape
        W = self.heads.permute(0, 2, 1).reshape(h * k, d)
        u = torch.einsum("ntd, hdk -> ntkh", z, self.heads).mT
        u = torch.tanh(self.told("heads", W, z, u.flatten(2)).unflatten(2, (h, k)))
        z = torch.tanh(self.told("merge", self.merge.flatten(0, 1).T, u.flatten(2), torch.einsum("...hk,hko", u, self.merge)))
        z = torch.tanh(self.told("inner", self.inner, z, torch.inner(z, self.inner.clone())))
        W = self.inside.transpose(0, 1)
        z = torch.tanh(self.told("inside", W.T, z, torch.bmm(z, W.expand(len(z), -1, -1))))
        return self.told("vector", self.vector[None], z, (z @ self.vector)[..., None])[..., 0]


class Groups(Told):
    """Weights with three axes: one matrix for each group, in one product or taken out one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.many = matrix(3, 4, 5)
        self.more = matrix(3, 2, 5)
        self.taken = matrix(3, 2, 4)
        self.readout = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.bmm(x.transpose(0, 1), self.many).transpose(0, 1)  # [n,3,5]
        z = self.told("many", torch.block_diag(*self.many.mT), x.flatten(1), z.flatten(1)).view(z.shape)
        h = torch.tanh(z)
        z = torch.einsum("grd,ngd->ngr", self.more, h)
        z = self.told("more", torch.block_diag(*self.more), h.flatten(1), z.flatten(1)).view(z.shape)
        h, parts = torch.tanh(z), self.taken.unbind(0)
        z = [self.told(f"taken.{i}", W.T, h[:, i], torch.matmul(h[:, i], W)) for i, W in enumerate(parts)]
        return self.readout(torch.tanh(torch.stack(z, 1)).flatten(1))


class Parts(Told):
    """Slices of a parameter, some of them used twice and some not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.fused = matrix(7, 5)
        self.block = nn.Linear(5, 6)
        self.square = matrix(6, 3)
        self.steps = matrix(5, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.fused.split([4, 3])
        a = torch.tanh(self.told("fused.0:4", q, x, F.linear(x, q)))
        b = torch.tanh(self.told("fused.4:7", k, x, F.linear(x, k)))
        c = torch.cat([a, b[:, :1]], 1)
        c = torch.tanh(self.told("block.weight.0:3", self.block.weight[:3], c, F.linear(c, self.block.weight[:3])))
        S = self.square[:3]  # as many entries as the half that is not used: two maps of it are as large as the parameter
        c = torch.tanh(self.told("square.0:3", S.T, c, c @ S))
        c = torch.tanh(self.told("square.0:3.T", S, c, c @ S.T))
        W = self.steps[1:4, ::3]
        c = torch.tanh(self.told("steps.1:4,0:10:3", W.T, c, c @ W))
        W = self.steps[4].view(3, 4)
        return self.told("steps.4", W, c, F.linear(c, W))


class Convolved(Told):
    """Convolutions with raw weights."""

    def __init__(self) -> None:
        super().__init__()
        self.flat = matrix(4, 2, 3)
        self.depth = matrix(4, 2)
        self.readout = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = F.conv1d(x, self.flat, stride=2, padding=1)
        h = F.pad(x, (1, 1)).unfold(2, 3, 2).permute(0, 2, 1, 3).flatten(2)
        x = torch.tanh(self.told("flat", self.flat.flatten(1), h, z.mT).mT)
        z = F.conv1d(x, self.depth.unsqueeze(1), None, 1, "same", 1, 4)
        h = F.pad(x, (0, 1)).unfold(2, 2, 1).permute(0, 2, 1, 3).flatten(2)
        z = self.told("depth", torch.block_diag(*self.depth.unsqueeze(1)), h, z.mT).mT
        return self.readout(torch.tanh(z).mean(2))


class ScaledEmbedding(nn.Embedding):
    """A table with a forward of its own, which scales what it looks up."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * 3.0


class Positions(nn.Embedding):
    """A table that returns its first rows."""

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[1 : 1 + ids.shape[1]]


class Tables(Told):
    """Lookups by function and by index, a scaled table that two modules and the read-out share, rows that all examples share."""

    def __init__(self, V: int = 7, d: int = 5) -> None:
        super().__init__()
        self.raw = matrix(V, d)
        self.rows = matrix(V, d)
        self.scaled = ScaledEmbedding(V, d, padding_idx=2)
        self.again = ScaledEmbedding(V, d)
        self.again.weight = self.scaled.weight
        nn.init.normal_(self.scaled.weight)  # the row of the padding token too: the read-out uses it
        self.places = Positions(6, d)

    def forward(self, ids: Tensor) -> Tensor:
        V = self.raw.shape[0]
        one_hot = F.one_hot(ids, V).to(self.raw)
        padded = one_hot * (ids != 1)[..., None]
        z = self.told("raw", self.raw.T, padded, F.embedding(ids, self.raw, padding_idx=1))
        z = z + self.told("rows", self.rows.T, one_hot, self.rows[ids - V])
        z = z + 3 * self.told("scaled", self.scaled.weight.T, one_hot * (ids != 2)[..., None], self.scaled(ids) / 3)
        z = z + 3 * self.told("again", self.again.weight.T, one_hot, self.again(ids) / 3)
        first = F.one_hot(torch.arange(1, 1 + ids.shape[1], device=ids.device), 6).to(self.raw)
        z = torch.tanh(z + self.told("places", self.places.weight.T, first, self.places(ids)))
        z = self.told("raw.T", self.raw, z, z @ self.raw.T)
        z = torch.tanh(self.told("raw.dense", self.raw.T, z, z @ self.raw))
        return self.told("scaled.T", self.scaled.weight, z, F.linear(z, self.scaled.weight))


# ------------------------------------------------------------------------------------------------------ the catalogue


def _case(
    name: str,
    factory: Callable[[], nn.Module],
    batch: Batch,
    maps: dict[str, str],
    gain: float = 2.0,
    unmapped: Iterable[str] = (),
    output: Callable[[Any], Tensor] | None = None,
) -> Case:
    return Case(name, seeded(factory, gain), batch, maps, frozenset(unmapped), output)


_CASES = [
    _case("mlp", mlp, gaussian(5), kinds("0 2 4")),
    _case("mlp_nobias", mlp_nobias, regression, kinds("0 2 4")),
    _case("cnn", cnn, gaussian(2, 7, 7), kinds("0 6 13", grouped="3 8"), gain=3.0),
    _case("cnn_modes", cnn_modes, gaussian(2, 5, 4), kinds("0 2 4 6 8 10 13"), gain=3.0),
    _case("conv1d", conv1d, gaussian(2, 8), kinds("0 6", grouped="2")),
    _case("conv3d", conv3d, gaussian(1, 4, 4, 4), kinds("0 5", grouped="2")),
    _case("groupnorm", groupnorm, gaussian(2, 5, 5), kinds("0 3 8")),
    _case("gpt", GPT, language, GPT_MAPS),
    _case("encoder", lambda: Encoder(batch_first=True), gaussian(5, 3), ENCODER_MAPS),
    _case("encoder_seq_first", lambda: Encoder(batch_first=False), gaussian(6, 3), ENCODER_MAPS),
    _case("mha_cross", CrossAttention, attention_inputs, kinds([*below("attn", MHA), "readout"])),
    _case("twice", Twice, gaussian(5), kinds("shared other readout")),
    _case("tied", Tied, gaussian(5), kinds("first second readout")),
    _case("tied_autoencoder", TiedAutoencoder, autoencoding, kinds("enc")),
    _case(
        "resnet",
        ResNet,
        gaussian(2, 6, 6),
        kinds("stem.0 layer1.conv1 layer1.conv2 layer2.conv1 layer2.conv2 layer2.downsample.0 fc"),
    ),
    _case("raw", Raw, gaussian(5), kinds("block.proj mix head")),
    _case("parametrized", parametrized, gaussian(5), kinds("0 2 4 6"), gain=1.0),
    _case("old_weight_norm", old_weight_norm, gaussian(5), kinds("0 2 4")),
    _case("checkpointed", Checkpointed, gaussian(5), kinds("embed first.0 first.2 second.0 second.2 readout")),
    _case("inplace_view", InplaceView, gaussian(5), kinds("first second readout")),
    _case("embedding_bag_of_words", BagOfWords, padded_words, kinds("hidden readout", lookup="embedding")),
    _case("folded", Folded, gaussian(4, 4), kinds("first second readout")),
    _case("multi_input", MultiInput, pairs, kinds("left right readout")),
    _case("dict_io", DictIO, pairs_as_dict, kinds("left right readout"), output=logits),
    _case("tuple_out", TupleOut, gaussian(5), kinds("first readout"), output=first),
    _case("moe", MixtureOfExperts, routed, kinds("embed gate experts.0 experts.1 readout")),
    _case(
        "lstm",
        Recurrent,
        gaussian(3, 4),
        kinds([*gated("lstm", "ifgo", "ih_l0 hh_l0"), "readout"]),
    ),
    _case("frozen", frozen, gaussian(5), kinds("0 2 4")),
    _case("unused", Unused, gaussian(5), kinds("first readout"), unmapped=["spare.weight"]),
    _case("hf_gpt2", hf_gpt2, hf_language, GPT_MAPS, gain=1.0, output=logits),
    _case(
        "hf_vit",
        hf_vit,
        hf_images,
        kinds(
            [
                "vit.embeddings.patch_embeddings.projection",
                *below("vit.layers.0", VIT_BLOCK),
                *below("vit.layers.1", VIT_BLOCK),
                "classifier",
            ]
        ),
        gain=1.0,
        unmapped=["vit.embeddings.position_embeddings"],
        output=logits,
    ),
    _case(
        "hf_resnet",
        hf_resnet,
        hf_images,
        kinds(
            [
                "resnet.embedder.embedder.convolution",
                *below("resnet.encoder.stages.0.layers.0", HF_RESNET_BLOCK),
                "resnet.encoder.stages.1.layers.0.shortcut.convolution",
                *below("resnet.encoder.stages.1.layers.0", HF_RESNET_BLOCK),
                *below("resnet.encoder.stages.1.layers.1", HF_RESNET_BLOCK),
                "classifier.1",
            ]
        ),
        gain=1.5,
        output=logits,
    ),
    _case(
        "hf_bert",
        hf_bert,
        hf_sentences,
        kinds(
            [
                *below("bert.encoder.layer.0", BERT_BLOCK),
                *below("bert.encoder.layer.1", BERT_BLOCK),
                "bert.pooler.dense",
                "classifier",
            ],
            lookup=" ".join(below("bert.embeddings", "word_embeddings position_embeddings token_type_embeddings")),
        ),
        gain=1.0,
        output=logits,
    ),
    _case("both_ways", BothWays, gaussian(5), kinds("W W.T inner inner.T conv conv.T"), gain=1.0),
    _case("both_ways_square", lambda: BothWays(5), gaussian(5), kinds("W W.T inner inner.T conv conv.T"), gain=1.0),
    _case("containers", Containers, gaussian(5), kinds([*below("w", "0 1 2"), *below("named", "a b"),
                                                        *below("layers", "0 1 2"), *below("heads", "one two")])),
    _case(
        "every_product",
        EveryProduct,
        gaussian(3, 5),
        kinds("left swapped keyword dots added heads merge inner inside vector"),
        gain=1.5,
    ),
    _case("groups", Groups, gaussian(3, 4), kinds("taken.0 taken.1 taken.2 readout", grouped="many more")),
    _case(
        "parts",
        Parts,
        gaussian(5),
        kinds("fused.0:4 fused.4:7 block.weight.0:3 square.0:3 square.0:3.T steps.1:4,0:10:3 steps.4"),
    ),
    _case("convolved", Convolved, gaussian(2, 8), kinds("flat readout", grouped="depth")),
    _case("tables", Tables, language, kinds("raw.T raw.dense scaled.T", lookup="raw rows scaled again places"), gain=1.0),
    _case(
        "lstm_deep",
        DeepRecurrent,
        gaussian(2, 2),
        kinds([*gated("lstm", "ifgo", " ".join(LSTM_SIDES)), *(f"lstm.hr{k[2:]}" for k in LSTM_SIDES[::2]), "readout"]),
    ),
    _case(
        "gru_rnn",
        Gated,
        gaussian(3, 3),
        kinds(["start", *gated("gru", "rzn", "ih_l0 hh_l0 ih_l1 hh_l1"),
               *gated("rnn", "", "ih_l0 hh_l0 ih_l0_reverse hh_l0_reverse"), "readout"]),
    ),
    _case("cells", Cells, gaussian(3, 3), kinds([*gated("lstm", "ifgo"), *gated("gru", "rzn"), *gated("rnn", ""), "readout"])),
    _case("packed", Packed, of_lengths, kinds([*gated("gru", "rzn", "ih_l0 hh_l0 ih_l0_reverse hh_l0_reverse"), "readout"])),
    _case("conv_transpose", Upsampler, gaussian(2, 3, 2), kinds("first third readout", grouped="second")),
    _case("conv_transpose13", conv_transpose13, gaussian(4, 3), kinds("3 6", grouped="0")),
    _case("bilinear", Pairing, pairs, kinds("pair again readout")),
    _case("embedding_bag", Bags, padded_words, kinds("readout", lookup="mean sum max")),
]
CASES: dict[str, Case] = {case.name: case for case in _CASES}
