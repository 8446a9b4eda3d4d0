"""The three networks of the doctor's experiment and their data, an output scale for each, a linearised copy to train beside."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from richter.instrument.observe import Observer
from richter.models import GPT, mlp
from richter.models.gpt import TransformerBlock
from richter.models.resnet import ResidualBlock, ResNet
from richter.tasks import Split, digits, mnist_5k, shakespeare

CONTEXT = 16  # characters that the GPT sees
Batch = tuple[Tensor, Tensor]


class ScaledNetwork(nn.Module):
    """f = alpha (h(w) - h(w0)), trained on loss / alpha^2: the larger alpha, the lazier."""

    def __init__(self, body: nn.Module, alpha: float) -> None:
        super().__init__()
        self.body, self.alpha = body, alpha
        # a constant of f; in a tuple torch does not register it
        self._start = () if isinstance(body, ResNet10) else (copy.deepcopy(body).requires_grad_(False),)

    def forward(self, x: Tensor) -> Tensor:
        f = self.body(x)
        for start in self._start:
            f = f - start(x)
        return self.alpha * f


def _with_batch_statistics(model: nn.Module) -> nn.Module:
    """The model, or a copy whose batch norms keep nothing: forward mode cannot write into their buffers."""
    if not any(isinstance(m, nn.BatchNorm2d) for m in model.modules()):
        return model
    other = copy.deepcopy(model)
    for norm in other.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.track_running_stats, norm.running_mean, norm.running_var, norm.num_batches_tracked = False, None, None, None
    return other


class Linearised(nn.Module):
    """f(w0) + J0 (w - w0): the first-order expansion of a model at its start, with parameters of its own to train."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = (_with_batch_statistics(model),)
        self._start = {k: p.detach().clone() for k, p in model.named_parameters()}
        self._names = [k for k, p in model.named_parameters() if p.requires_grad]
        self.weights = nn.ParameterList([self._start[k].clone() for k in self._names])

    def forward(self, x: Tensor) -> Tensor:
        start = {k: self._start[k] for k in self._names}
        moved = {k: w - start[k] for k, w in zip(self._names, self.weights, strict=True)}
        with sdpa_kernel(SDPBackend.MATH):  # fused attention has no forward mode
            f0, change = jvp(  # type: ignore[misc]  # two values without has_aux
                lambda w: functional_call(self._model[0], {**self._start, **w}, (x,)), (start,), (moved,))
        return f0 + change


def cnn(channels: int = 16, classes: int = 10, seed: int = 0) -> nn.Sequential:
    """Three convolutions and a read-out for images of 14 x 14."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), nn.ReLU(),
                             nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU(),
                             nn.Conv2d(2 * channels, 2 * channels, 3, stride=2, padding=1), nn.ReLU(),
                             nn.Flatten(), nn.Linear(2 * channels * 16, classes))


class ResNet10(ResNet):
    """A ResNet with one block in each of four stages. Its residual branches begin at zero, as is usual, and so does its read-out:
    f = 0 at the start, without a copy to subtract."""

    def __init__(self, width: int, classes: int) -> None:
        widths = (width, 2 * width, 4 * width, 4 * width)
        super().__init__(widths, classes, 1)
        self.blocks = nn.Sequential(*(ResidualBlock(a, b, 2 if i else 1)
                                      for i, (a, b) in enumerate(itertools.pairwise((width, *widths)))))
        for block in self.blocks:
            assert isinstance(block, ResidualBlock)
            nn.init.zeros_(block.norm2.weight)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def hidden(self, x: Tensor) -> Tensor:
        return self.blocks(torch.relu(self.norm(self.conv(x)))).mean((2, 3))  # type: ignore[no-any-return]


class PatchBlock(TransformerBlock):
    """The block of ``GPT`` with attention to every patch."""

    def forward(self, x: Tensor) -> Tensor:
        n, T, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, T, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, T, d))
        return x + self.out(F.gelu(self.fc(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer: patches of a 14 x 14 image, pre-norm blocks with attention and an MLP, the mean over patches, a
    read-out."""

    def __init__(self, d: int, classes: int, patch: int = 7, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, d, patch, stride=patch)
        self.position = nn.Parameter(0.02 * torch.randn((14 // patch) ** 2, d))
        self.blocks = nn.Sequential(*(PatchBlock(d, 4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, classes)

    def hidden(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self.patches(x).flatten(2).mT + self.position)).mean(1)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(x))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NetworkSetup:
    """A network and what it learns: ``data(seed)`` are examples to train on and others to test on, ``build(width, seed)`` is the
    model, ``features(model, x)`` what its read-out reads, a row for each label; how long it trains, and how many examples
    measure it."""

    data: Callable[[int], Split]
    classes: int
    build: Callable[[float, int], nn.Module]
    features: Callable[[nn.Module, Tensor], Tensor]
    epochs: int
    probe: int = 256


def _small_digits(seed: int) -> Split:
    """A thousand MNIST digits and half as many test digits, averaged to 14 x 14 pixels."""
    data = mnist_5k(seed=seed, flat=False)
    return Split(F.avg_pool2d(data.x[:1000], 2), data.y[:1000], F.avg_pool2d(data.x_test[:500], 2), data.y_test[:500])


def _recall(seed: int) -> Split:
    """Task of naming the previous character of Shakespeare at each position. Attention must find it, so that features can
    gain. The next character would be mostly noise to a network of this size: no training of a minute would be rich by its
    gain."""
    text, draw = shakespeare(), torch.Generator().manual_seed(seed)
    train, test = text.batch(1024, CONTEXT + 1, draw)[0], text.batch(128, CONTEXT + 1, draw, test=True)[0]
    return Split(train[:, 1:], train[:, :-1], test[:, 1:], test[:, :-1])


def _before_read_out(model: nn.Module, x: Tensor) -> Tensor:
    """Features before the last layer of a sequential network."""
    assert isinstance(model, nn.Sequential)
    return model[:-1](x)


def _hidden(model: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(model, (ResNet10, ViT))
    return model.hidden(x)


def _seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def _before_head(model: nn.Module, ids: Tensor) -> Tensor:
    """Features before the head of a GPT, one row per token."""
    assert isinstance(model, GPT)
    x = model.token(ids) + model.position(torch.arange(ids.shape[1], device=ids.device))
    return model.norm(model.blocks(x)).flatten(0, 1)


NETWORKS = {
    "MLP": NetworkSetup(lambda seed: digits(seed=seed), 10, lambda width,
                        seed: mlp([64, *[round(256 * width)] * 2, 10], seed=seed),
                   _before_read_out, epochs=40),
    "CNN": NetworkSetup(_small_digits, 10, lambda width, seed: cnn(round(16 * width), seed=seed), _before_read_out, epochs=20),
    "GPT": NetworkSetup(_recall, 77, lambda width, seed: GPT(77, CONTEXT, round(32 * width), seed=seed), _before_head, epochs=20,
                   probe=64),
    "ResNet-10": NetworkSetup(_small_digits, 10, lambda width, seed: _seeded(lambda: ResNet10(round(8 * width), 10), seed),
                              _hidden, epochs=12, probe=128),
    "ViT": NetworkSetup(_small_digits, 10, lambda width, seed: _seeded(lambda: ViT(round(32 * width), 10), seed), _hidden,
                        epochs=25, probe=128),
}


def cross_entropy(f: Tensor, y: Tensor) -> Tensor:
    """Mean over examples, and over tokens where there is an output for each."""
    return F.cross_entropy(f.flatten(0, -2), y.flatten())


def batches(data: Batch, epochs: int, size: int, draw: torch.Generator) -> list[Batch]:
    """Batches in a new order for each epoch; the network and its linearised copy get the same."""
    x, y = data
    return [(x[rows], y[rows]) for _ in range(epochs) for rows in torch.randperm(len(x), generator=draw).split(size)]


def train(model: nn.Module, steps: Iterable[Batch], optimiser: torch.optim.Optimizer, divisor: float = 1.0,
          watch: Observer | None = None) -> None:
    """Do one step for each batch on the loss / divisor, until the loss is not finite. The Observer gets the loss itself."""
    for step, (x, y) in enumerate(steps, 1):
        loss = cross_entropy(model(x), y)
        optimiser.zero_grad()
        (loss / divisor).backward()
        optimiser.step()
        if watch is not None:
            watch(step, loss=loss.item())
        if not loss.isfinite():
            break


def optimiser(params: Sequence[Tensor], name: str, lr: float, decay: float = 0.0,
              factors: Sequence[float] | None = None) -> torch.optim.Optimizer:
    """SGD or Adam; ``factors``: of the learning rate, one for each parameter."""
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}
    groups = [{"params": [p], "lr": lr * k} for p, k in zip(params, factors or [1.0] * len(params), strict=True)]
    return kinds[name](groups, lr=lr, weight_decay=decay)
