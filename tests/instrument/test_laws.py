"""What must hold whatever the network: invariances, identities between statistics, bounds, and agreement of the fast
forms with the definitions."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from test_linalg import with_spectrum
from torch import Tensor, nn

import oracles
import richter
from richter import kernels
from richter.core import WHOLE, MemoryBudgetError
from richter.instrument.capture import quiet, state_of
from richter.instrument.cotangents import every_output, random_outputs
from richter.instrument.statistics import Factor, FeatureMatrix, egop
from richter.instrument.statistics import moments as bases
from richter.instrument.stream import Chunk, LayerCapture, covariance, covariances
from richter.instrument.survey import Network, survey
from richter.measures import catalogue
from richter.measures.nfa import diagonal_pearson, pearson

EVERY = list(catalogue())
TANGENT = [name for name, m in catalogue().items() if m.of_kernels]
SOME = ["nfc", "cnfc", "ptk_centred_nfc", "c_uc_ratio", "nfc_pearson", *TANGENT]  # a measure for each statistic
SCALE_FREE = [name for name in SOME if not name.startswith("fisher_")]  # a softmax is sharper where outputs are larger
N = 9  # examples: more than the groups of a jackknife and than a survey looks at
OUTPUTS = ["trace", "diagonal", "full"]
SEEDS = st.integers(0, 10_000)
SCALES = st.sampled_from([1e-3, 0.03, 0.7, 5.0, 1e3])
EACH_KIND = pytest.mark.parametrize("kind", ["mlp", "tall", "conv", "tokens"])
EACH_PERCEPTRON = pytest.mark.parametrize("kind", ["mlp", "tall"])
EACH_OUTPUTS = pytest.mark.parametrize("outputs", OUTPUTS)
BIAS = pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])


def law(examples: int = 15) -> Callable[[Any], Any]:
    phases = (Phase.explicit, Phase.generate, Phase.shrink)
    return settings(deadline=None, max_examples=examples, derandomize=True, database=None, phases=phases)


# ------------------------------------------------------------------------------------------------ networks and data


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def semidefinite(seed: int, n: int, rank: int | None = None) -> Tensor:
    A = normal(seed, n, rank or n)
    return A @ A.T / n


class Tokens(nn.Module):
    """One layer at every token, a norm, and the mean over tokens."""

    def __init__(self, bias: bool, act: nn.Module) -> None:
        super().__init__()
        self.embed, self.norm, self.act = nn.Linear(4, 6, bias=bias), nn.LayerNorm(6), act
        self.readout = nn.Linear(6, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.readout(self.act(self.norm(self.embed(x))).mean(1))


def network(kind: str, seed: int, bias: bool = True, act: type[nn.Module] = nn.Tanh, gain: float = 1.5) -> nn.Module:
    """A small float64 network with three outputs; `gain` multiplies every weight matrix."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "mlp":
            layers = [nn.Linear(5, 8, bias=bias), act(), nn.Linear(8, 6, bias=bias), act(), nn.Linear(6, 3, bias=bias)]
        elif kind == "tall":
            layers = [nn.Linear(2, 9, bias=bias), act(), nn.Linear(9, 3, bias=bias), act(), nn.Linear(3, 3, bias=bias)]
        elif kind == "conv":
            layers = [nn.Conv2d(2, 4, 2, bias=bias), nn.GroupNorm(2, 4), act(), nn.Conv2d(4, 6, 2, groups=2, bias=bias),
                      act(), nn.Flatten(), nn.Linear(24, 3, bias=bias)]  # fmt: skip
        else:
            layers = []
        model = (nn.Sequential(*layers) if layers else Tokens(bias, act())).double()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(gain) if p.dim() > 1 else p.add_(0.2 * torch.randn(p.shape, dtype=p.dtype))
    return model


SHAPES = {"mlp": (5,), "tall": (2,), "conv": (2, 4, 4), "tokens": (5, 4)}


def inputs(kind: str, seed: int, n: int = N) -> Tensor:
    return normal(seed + 1, n, *SHAPES[kind])


def labels(n: int = N) -> Tensor:
    return torch.arange(n) % 3


def initial(kind: str, seed: int, **options: Any) -> dict[str, Tensor]:
    return {k: v.detach().clone() for k, v in network(kind, seed + 20_000, **options).state_dict().items()}


def values(model: nn.Module, x: Tensor, y: Tensor | None, measures: Any = SOME, *, probe: Mapping[str, Any] = {},
           **options: Any) -> dict[tuple[str, str], float]:  # fmt: skip
    """{(measure, layer): value}, kernels over all examples."""
    snap = richter.measure(model, richter.Probe(x, y, kernel_examples=None, **probe), measures, **options)
    return {(r.measure, r.layer): r.value for r in snap.rows}


def same(a: Mapping[Any, float], b: Mapping[Any, float], tolerance: float) -> None:
    """Assert that two tables have the same keys, the same NaN and the same numbers."""
    assert a.keys() == b.keys()
    wrong = {k: (a[k], b[k]) for k in a if not (math.isnan(a[k]) and math.isnan(b[k]))
             and not abs(a[k] - b[k]) <= tolerance * max(1.0, abs(b[k]))}  # fmt: skip
    assert not wrong


def equal(A: Tensor, B: Tensor, tolerance: float = 1e-10) -> None:
    """Assert that two tensors have one shape and differ by little, relative to the larger."""
    assert A.shape == B.shape
    assert (A - B).norm() <= tolerance * max(A.norm(), B.norm())


def test_the_comparisons_see_a_difference() -> None:
    for other in ({"a": 1.0 + 1e-9}, {"a": math.nan}, {"b": 1.0}, {}):
        for a, b in (({"a": 1.0}, other), (other, {"a": 1.0})):
            with pytest.raises(AssertionError):
                same(a, b, 1e-10)
    same({"a": math.nan, "b": 1.0}, {"a": math.nan, "b": 1.0}, 0.0)
    for B in (torch.ones(3) + 1e-5, torch.ones(1, 3)):
        with pytest.raises(AssertionError):
            equal(torch.ones(3), B)


# --------------------------------------------------------------------------------------------- what changes no number


@EACH_KIND
@law(2)
@given(seed=SEEDS, chunk=st.integers(1, N))
def test_the_size_of_chunks_changes_no_number(kind: str, seed: int, chunk: int) -> None:
    model, x, then = network(kind, seed), inputs(kind, seed), initial(kind, seed)
    probes = (richter.Probe(x, labels(), chunk=c, weight_decay=0.1) for c in (N, chunk))
    whole, pieces = (richter.measure(model, probe, EVERY, initial=then).rows for probe in probes)
    for column, tolerance in (("value", 1e-10), ("error", 1e-6)):
        a, b = ({(r.measure, r.layer): getattr(r, column) for r in rows} for rows in (pieces, whole))
        same(a, b, tolerance)


@EACH_KIND
@law(2)
@given(seed=SEEDS, chunk=st.integers(1, N - 1))
def test_the_size_of_chunks_changes_no_number_in_single_precision(kind: str, seed: int, chunk: int) -> None:
    model, x = network(kind, seed).float(), inputs(kind, seed).float()
    names = ["nfc", "tangent_alignment", "tangent_cka", "tangent_stable_rank", "tangent_correlation"]
    same(values(model, x, labels(), names, probe={"chunk": chunk}), values(model, x, labels(), names), 1e-5)


def least_memory(measured: Callable[..., Any]) -> int:
    """The smallest memory that works, found by following what the errors say."""
    memory = 16
    for _ in range(20):
        try:
            measured(memory=memory)
        except MemoryBudgetError as error:
            memory = richter.core.parse_bytes(re.findall(r"works here is memory='([^']+)'", str(error))[0])
        else:
            return memory
    raise AssertionError(f"memory={memory} does not work either")


@EACH_KIND
@law(2)
@given(seed=SEEDS, more=st.sampled_from([1.0, 1.3, 3.0]))
def test_memory_changes_no_number(kind: str, seed: int, more: float) -> None:
    model, x, then = network(kind, seed), inputs(kind, seed, 4), initial(kind, seed)

    def measured(**options: Any) -> dict[tuple[str, str], float]:
        return values(model, x, labels(4), ["nfc", "ptk_centred_nfc", "tangent_cka"], initial=then, **options)

    same(measured(memory=more * least_memory(measured)), measured(), 1e-10)


@EACH_KIND
@EACH_OUTPUTS
@law(2)
@given(seed=SEEDS, more=st.sampled_from([1.0, 1.3, 3.0]))
def test_memory_changes_no_kernel(kind: str, seed: int, more: float, outputs: str) -> None:
    model, x = network(kind, seed), inputs(kind, seed, 5)
    least = least_memory(lambda memory: kernels.ntk(model, x, form=outputs, memory=memory))
    equal(kernels.ntk(model, x, form=outputs, memory=more * least), kernels.ntk(model, x, form=outputs))


@EACH_KIND
@law(3)
@given(seed=SEEDS, order=st.permutations(range(N)))
def test_the_order_of_examples_changes_no_number(kind: str, seed: int, order: list[int]) -> None:
    model, x, y, then = network(kind, seed), inputs(kind, seed), labels(), initial(kind, seed)
    same(values(model, x[order], y[order], initial=then), values(model, x, y, initial=then), 1e-10)
    K = kernels.ntk(model, x, form="full")
    equal(kernels.ntk(model, x[order], form="full"), K[order][:, :, order])


@EACH_KIND
@law(3)
@given(seed=SEEDS, scale=SCALES)
def test_the_scale_of_the_outputs_changes_no_correlation(kind: str, seed: int, scale: float) -> None:
    """f -> c f multiplies every kernel and every gradient product, and nothing else."""
    model, x, then = network(kind, seed), inputs(kind, seed), initial(kind, seed)
    plain = values(model, x, labels(), SCALE_FREE, initial=then)
    same(values(model, x, labels(), SCALE_FREE, initial=then, output=lambda f: scale * f), plain, 1e-8)


@EACH_PERCEPTRON
@law(4)
@given(seed=SEEDS, scale=SCALES)
def test_the_scale_of_the_read_out_changes_no_correlation(kind: str, seed: int, scale: float) -> None:
    """The read-out (now and then) times c: layer by layer, not for the sum over layers."""
    model, x, then = network(kind, seed), inputs(kind, seed), initial(kind, seed)
    plain = values(model, x, labels(), SCALE_FREE, initial=then)
    with torch.no_grad():
        model[4].weight.mul_(scale)
    after = values(model, x, labels(), SCALE_FREE, initial={**then, "4.weight": scale * then["4.weight"]})
    for table in (plain, after):
        for key in [key for key in table if key[1] == WHOLE]:
            del table[key]
    same(after, plain, 1e-8)


@EACH_PERCEPTRON
@law(4)
@given(seed=SEEDS, scale=SCALES)
def test_the_scale_of_the_inputs_changes_no_correlation_of_relu_networks(kind: str, seed: int, scale: float) -> None:
    """Without biases f(a x) = a f(x): kernels get a factor a^2, gradients none."""
    options = {"bias": False, "act": nn.ReLU}
    model, x, then = network(kind, seed, **options), inputs(kind, seed), initial(kind, seed, **options)
    plain, after = (values(model, a * x, labels(), SCALE_FREE, initial=then) for a in (1.0, scale))
    same(after, plain, 1e-8)
    equal(kernels.ntk(model, scale * x), scale**2 * kernels.ntk(model, x))


def test_the_scale_of_the_inputs_matters_to_other_networks() -> None:
    """So that the law before this one is not true of everything."""
    plain, scaled = (values(network("mlp", 0), a * inputs("mlp", 0), labels(), ["nfc", "tangent_cka"]) for a in (1, 3))
    assert abs(scaled["nfc", "0"] - plain["nfc", "0"]) > 1e-3
    assert abs(scaled["tangent_cka", WHOLE] - plain["tangent_cka", WHOLE]) > 1e-3


@EACH_KIND
@law(4)
@given(seed=SEEDS)
def test_rotating_the_outputs_changes_no_sum_over_outputs(kind: str, seed: int) -> None:
    model, x, then = network(kind, seed), inputs(kind, seed), initial(kind, seed)
    Q = torch.linalg.qr(normal(seed, 3, 3))[0]
    of_weights = [name for name in SOME if name not in TANGENT]
    plain = values(model, x, None, of_weights, initial=then)
    same(values(model, x, None, of_weights, initial=then, output=lambda f: f @ Q.T), plain, 1e-9)
    K, rotated = (kernels.ntk(model, x, per_layer=True, output=o) for o in (None, lambda f: f @ Q.T))
    assert K.keys() == rotated.keys()
    for layer in K:
        equal(rotated[layer], K[layer])
    full = kernels.ntk(model, x, form="full")
    equal(kernels.ntk(model, x, form="full", output=lambda f: f @ Q.T),
          torch.einsum("av,nvmw,bw->namb", Q, full, Q))  # fmt: skip


# --------------------------------------------------------------------------------------------------- kernels and bounds


@EACH_KIND
@law(4)
@given(seed=SEEDS)
def test_kernels_are_symmetric_and_semidefinite(kind: str, seed: int) -> None:
    model, x = network(kind, seed), inputs(kind, seed)
    for K in kernels.ntk(model, x, form="full", per_layer=True).values():
        flat = K.reshape(3 * N, 3 * N)
        equal(flat, flat.T, 1e-13)
        spectrum = torch.linalg.eigvalsh(flat)
        assert spectrum[0] >= -1e-12 * spectrum[-1]
        assert spectrum[-1] > 0
    for K in (kernels.ntk(model, x), *kernels.ntk(model, x, form="diagonal")):
        equal(K, K.T, 1e-13)
        spectrum = torch.linalg.eigvalsh(K)
        assert spectrum[0] >= -1e-12 * spectrum[-1]


@EACH_KIND
@BIAS
@law(2)
@given(seed=SEEDS, gain=st.sampled_from([30.0, 1.5, 0.3, 1e-3]), regression=st.booleans())
def test_every_measure_is_within_its_bounds(kind: str, seed: int, gain: float, regression: bool, bias: bool) -> None:
    model, then = network(kind, seed, gain=gain, bias=bias), initial(kind, seed, bias=bias)
    found = values(model, inputs(kind, seed), normal(seed, N, 3) if regression else labels(), EVERY, initial=then,
                   probe={"weight_decay": 0.1})
    known = catalogue()
    assert {measure for measure, _ in found} == set(known)
    outside = {k: v for k, v in found.items() if not math.isnan(v) and v not in known[k[0]].card.bounds.widened(1e-9)}
    assert not outside
    assert sum(map(math.isfinite, found.values())) > len(found) / 2


@EACH_KIND
@law(4)
@given(seed=SEEDS)
def test_alignment_is_correlation_over_the_root_of_the_rank(kind: str, seed: int) -> None:
    found = values(network(kind, seed), inputs(kind, seed), labels(), TANGENT)
    layers = {layer for _, layer in found}
    assert WHOLE in layers
    for layer in layers:
        rank = found["tangent_stable_rank", layer]
        assert found["tangent_cka", layer] == pytest.approx(found["tangent_correlation", layer] / rank**0.5, rel=1e-10)


def test_a_constant_kernel_has_no_centred_part() -> None:
    """The kernel of one added number is c^2 at every pair: what is left after centring is 0/0, not rounding."""

    class Shift(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.shift, self.scale = nn.Parameter(torch.zeros(1, dtype=torch.float64)), scale

        def forward(self, x: Tensor) -> Tensor:
            return x[:, :1] + self.scale * self.shift

    x = inputs("mlp", 0)
    for scale in (1.0, 0.31, 0.1, 7.3):
        found = values(Shift(scale), x, x[:, 1:2], TANGENT)
        assert found["tangent_alignment", WHOLE] > 0
        for measure in ("tangent_cka", "tangent_stable_rank", "tangent_correlation"):
            assert math.isnan(found[measure, WHOLE]), (measure, scale, found[measure, WHOLE])


# ---------------------------------------------------------------------------------------------- layers and their parts


def captured(model: nn.Module, x: Tensor, name: str) -> LayerCapture:
    """What one batch says about one map, every output asking."""
    with quiet(model):
        state = state_of(model)
        found = survey(model, x, state)
        asked = lambda f, rows: every_output(f)  # noqa: E731
        chunk = Chunk(Network(model, state, found), x, slice(0, len(x)), [name])
        return chunk.ask(asked(chunk.f, slice(0, len(x))))[name]


LAYERS = {"mlp": ["0", "2", "4"], "tall": ["0", "2", "4"], "conv": ["0", "3", "6"], "tokens": ["embed", "readout"]}


@EACH_KIND
@law(4)
@given(seed=SEEDS)
def test_gradient_products_are_those_of_the_kernel_covariance(kind: str, seed: int) -> None:
    """G = W^T K W, with K the covariance of what the outputs ask of the layer."""
    model, x = network(kind, seed), inputs(kind, seed, 6)
    for name in LAYERS[kind]:
        c = captured(model, x, name)
        W = torch.block_diag(*c.W) if c.kind == "grouped" else c.W
        g = c.g.flatten(3)
        K = covariance(g) / (g.shape[1] * g.shape[2])
        equal(FeatureMatrix(Factor(W), K).dense(), oracles.agop(W, g.transpose(0, 1)), 1e-12)
        assert torch.linalg.eigvalsh(K)[0] >= -1e-12 * K.norm()
    if kind in ("mlp", "tall"):  # what the first layer reads is the input
        c = captured(model, x, "0")
        equal(FeatureMatrix(Factor(c.W), covariance(c.g) / (c.g.shape[1] * c.g.shape[2])).dense(), egop(model, x), 1e-12)


@EACH_PERCEPTRON
@BIAS
@law(6)
@given(seed=SEEDS)
def test_a_layer_at_one_position_is_a_product_of_two_kernels(kind: str, seed: int, bias: bool) -> None:
    """K_l = (h h^T + 1 with a bias) o (g g^T); the trace of g g^T over outputs is the pre-activation kernel."""
    model, x = network(kind, seed, bias=bias), inputs(kind, seed)
    layers = kernels.ntk(model, x, form="full", per_layer=True)
    assert list(layers) == LAYERS[kind]
    for name, K in layers.items():
        forward, backward = kernels.forward_kernel(model, x, name), kernels.backward_kernel(model, x, name)
        assert (forward.shape, backward.shape) == ((N, N), (N, 3, N, 3))
        equal(K, (forward + bias)[:, None, :, None] * backward)
        equal(kernels.ptk(model, x, name), torch.einsum("nvmv->nm", backward))
        if not bias:
            equal(oracles.reduce_outputs(K, "trace"), forward * kernels.ptk(model, x, name))


@pytest.mark.parametrize("kind", ["conv", "tokens"])
@BIAS
@law(6)
@given(seed=SEEDS)
def test_a_layer_at_positions_is_a_sum_over_their_pairs(seed: int, bias: bool, kind: str) -> None:
    """K_l = sum over s, t of (h_s . h_t + 1 with a bias) (g_s . g_t)."""
    model, x = network(kind, seed, bias=bias), inputs(kind, seed, 5)
    name = LAYERS[kind][0]
    forward, backward = kernels.forward_kernel(model, x, name), kernels.backward_kernel(model, x, name)
    s = {"conv": 9, "tokens": 5}[kind]
    assert (forward.shape, backward.shape) == ((5, s, 5, s), (5, 3, s, 5, 3, s))
    K = torch.einsum("nsmt,nvsmwt->nvmw", forward + bias, backward)
    equal(kernels.ntk(model, x, form="full", per_layer=True)[name], K)
    equal(kernels.ptk(model, x, name), torch.einsum("nvsmvt->nsmt", backward))


@EACH_KIND
@law(4)
@given(seed=SEEDS)
def test_layers_add_up_to_the_whole(kind: str, seed: int) -> None:
    """Weights, biases and norms: the sum over layers is the kernel of all parameters at once."""
    model, x = network(kind, seed), inputs(kind, seed, 4)
    layers, whole = kernels.ntk(model, x, form="full", per_layer=True), kernels.ntk(model, x, form="full")
    assert set(layers) == {name for name, m in model.named_modules() if list(m.parameters(recurse=False))}
    equal(torch.stack(list(layers.values())).sum(0), whole, 1e-13)
    J = torch.cat([j.flatten(2) for j in oracles.jacobian(model, x).values()], -1)
    equal(whole, torch.einsum("nvp,mwp->nvmw", J, J))


@EACH_KIND
@pytest.mark.parametrize("per_layer", [True, False], ids=["layers", "whole"])
@law(3)
@given(seed=SEEDS)
def test_trace_and_diagonal_are_contractions_of_the_full_kernel(kind: str, seed: int, per_layer: bool) -> None:
    model, x = network(kind, seed), inputs(kind, seed)
    full, diagonal, trace = ({"": K} if isinstance(K, Tensor) else K for K in (
        kernels.ntk(model, x, form=o, per_layer=per_layer) for o in ("full", "diagonal", "trace")))  # fmt: skip
    assert full.keys() == diagonal.keys() == trace.keys()
    for layer in full:
        equal(diagonal[layer], torch.einsum("nvmv->vnm", full[layer]))
        equal(trace[layer], torch.einsum("nvmv->nm", full[layer]))


@EACH_KIND
@EACH_OUTPUTS
@law(3)
@given(seed=SEEDS, first=st.integers(1, N - 1))
def test_a_kernel_of_two_sets_is_a_block_of_the_kernel_of_both(kind: str, seed: int, first: int, outputs: str) -> None:
    model, x = network(kind, seed), inputs(kind, seed)
    whole, block = kernels.ntk(model, x, form=outputs), kernels.ntk(model, x[:first], x[first:], form=outputs)
    equal(block, whole[:first, :, first:] if outputs == "full" else whole[..., :first, first:])
    other = kernels.ntk(model, x[first:], x[:first], form=outputs)
    equal(other, block.permute(2, 3, 0, 1) if outputs == "full" else block.transpose(-1, -2))


def test_random_outputs_are_right_on_average() -> None:
    """E[sum_v V_v V_v^T] = I: the mean over seeds is the exact kernel within its own standard error."""
    model, x, seeds = network("mlp", 3), inputs("mlp", 3, 4), 150
    exact = kernels.ntk(model, x)
    drawn = torch.stack([kernels.ntk(model, x, cotangents=random_outputs(2, seed)) for seed in range(seeds)])
    error = drawn.std(0) / seeds**0.5
    assert (error < 0.1 * exact.abs().mean()).all()
    assert (error > 0).all()
    assert ((drawn.mean(0) - exact).abs() < 4 * error).all()
    traces = drawn.diagonal(dim1=1, dim2=2).sum(-1)
    assert abs(traces.mean() - exact.trace()) < 3 * traces.std() / seeds**0.5
    again = kernels.ntk(model, x, cotangents=random_outputs(2, 0))
    assert torch.equal(again, drawn[0])
    assert not torch.equal(again, drawn[1])


@pytest.mark.parametrize("v", [1, 3, 64])
def test_random_outputs_have_unit_covariance(v: int) -> None:
    f = torch.zeros(2, 5, dtype=torch.float64)
    R = torch.stack([random_outputs(v, seed)(f, None)[:, 0] for seed in range(400)])  # seed v k
    mean = torch.einsum("svk,svl->skl", R, R).mean(0)
    assert (mean - torch.eye(5)).abs().max() < 5 * (2 / (400 * v)) ** 0.5


# ---------------------------------------------------------------------------------------------------- feature matrices


MIDDLES = pytest.mark.parametrize("middle", ["none", "first", "second", "both", "same"])
FACTORS = pytest.mark.parametrize("shared", [True, False], ids=["one factor", "two factors"])
SIZES = st.integers(1, 7)


def feature_matrices(
    seed: int, r: int, q: int, d: int, shared: bool, middle: str
) -> tuple[FeatureMatrix, FeatureMatrix]:
    """W^T K W and V^T L V on the same inputs: with one factor or two, with no middle, one, two or twice the same."""
    A = Factor(normal(seed, r, d))
    B = A if shared else Factor(normal(seed + 1, r if middle == "same" else q, d))
    K = semidefinite(seed + 2, r) if middle in ("first", "both", "same") else None
    L = semidefinite(seed + 3, len(B.W)) if middle in ("second", "both") else K if middle == "same" else None
    return FeatureMatrix(A, K), FeatureMatrix(B, L)


@MIDDLES
@FACTORS
@law(15)
@given(seed=SEEDS, r=SIZES, q=SIZES, d=SIZES)
def test_feature_matrices_are_their_dense_matrices(
    seed: int, r: int, q: int, d: int, shared: bool, middle: str
) -> None:
    F, G = pair = feature_matrices(seed, r, q, d, shared, middle)
    A, B = (M.factor.W.T @ (torch.eye(len(M.factor.W)).double() if M.K is None else M.K) @ M.factor.W for M in pair)
    for M, dense in ((F, A), (G, B)):
        equal(M.dense(), dense, 1e-12)
        equal(M.diagonal(), dense.diagonal(), 1e-12)
        assert M.total() == pytest.approx(dense.sum().item(), rel=1e-10, abs=1e-11 * dense.norm().item())
        assert M.norm == pytest.approx(dense.norm().item(), rel=1e-10)
    size = A.norm().item() * B.norm().item()
    assert F.inner(G) == pytest.approx((A * B).sum().item(), abs=1e-11 * size)
    assert G.inner(F) == pytest.approx(F.inner(G), abs=1e-11 * size)


@MIDDLES
@FACTORS
@law(15)
@given(seed=SEEDS, r=SIZES, q=SIZES, d=SIZES)
def test_correlations_of_feature_matrices_are_those_of_dense_ones(
    seed: int, r: int, q: int, d: int, shared: bool, middle: str
) -> None:
    pair = feature_matrices(seed, r, q, d, shared, middle)
    A, B = (M.dense() for M in pair)
    assert FeatureMatrix.cosine(*pair) == pytest.approx(oracles.cosine(A, B), abs=1e-10)
    assert pearson(*pair) == pytest.approx(oracles.pearson(A, B), abs=1e-8, nan_ok=True)
    expected = oracles.pearson(A.diagonal(), B.diagonal())
    assert diagonal_pearson(*pair) == pytest.approx(expected, abs=1e-8, nan_ok=True)


def test_correlations_of_constant_matrices_do_not_exist() -> None:
    """An orthogonal W weighs all inputs alike: the diagonal of W^T W does not vary, and rounding is no variation."""
    Q, W = torch.linalg.qr(normal(1, 6, 6))[0], normal(2, 4, 6)
    constant = FeatureMatrix(Factor(torch.full((3, 6), 0.1, dtype=torch.float64)))
    other = FeatureMatrix(Factor(W))
    assert math.isnan(oracles.pearson(constant.dense(), other.dense()))
    assert math.isnan(pearson(constant, other))
    assert math.isnan(pearson(other, constant))
    assert math.isnan(FeatureMatrix.cosine(FeatureMatrix(Factor(0 * W)), other))
    assert math.isnan(oracles.pearson((Q.T @ Q).diagonal(), other.diagonal()))
    assert math.isnan(diagonal_pearson(FeatureMatrix(Factor(Q)), other))


@pytest.mark.parametrize(("tile", "written"), [(2 ** 20, 2 ** 20), (8, 2 ** 20), (8, 0)])
@pytest.mark.parametrize("then", [True, False], ids=["initial", "no initial"])
@law()
@given(seed=SEEDS, near=st.sampled_from([1.0, 1e-8]))
def test_what_is_asked_through_the_matrices_loses_nothing(seed: int, then: bool, tile: int, written: int, near: float) -> None:
    W, g = normal(seed, 15, 4), normal(seed + 2, 3, 2, 15)
    W0 = W - near * normal(seed + 1, *W.shape) if then else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bases, "TILE", tile)
        patch.setattr(bases, "WRITTEN", written)
        through = bases.Through(W, W0, lambda W: W.double())
        A = through.rows(g).flatten(0, -2)
        assert A.shape == (6, 8 if then else 4)
        g = g.flatten(0, -2)
        for now, change, V in [(1.0, 0.0, W), *([] if W0 is None else [(0.0, 1.0, W - W0), (1.0, -1.0, W0)])]:
            asked, weights = through.blocks([A.T @ A, through.gram()], now, change)
            equal(asked, (g @ V).T @ (g @ V), 1e-12)
            equal(weights, V.T @ V, 1e-12)


@law()
@given(seed=SEEDS, n=st.integers(3, 12), s=st.integers(1, 4), first=st.integers(0, 7))
def test_the_groups_of_a_chunk_are_summed_as_if_each_came_alone(seed: int, n: int, s: int, first: int) -> None:
    g, group = normal(seed, 2, n, s, 3), (first + torch.arange(n)) % 3
    for k, K in enumerate(covariances(g, 3, first)):
        equal(K, covariance(g[:, group == k]), 1e-12)


def test_where_moments_are_kept_through_the_matrices() -> None:
    """A map that writes much more than it reads; with few rows also one that writes a little more; never one that reads more."""
    assert bases.size((3072, 768), 2, 10 ** 6) == 2 * 768
    assert bases.size((2304, 768), 2, 10 ** 6) is None
    assert bases.size((2304, 768), 2, 1024) == 2 * 768
    assert bases.size((2304, 768), 1, 10 ** 6) == 768
    assert bases.size((768, 3072), 1, 1024) is None
    assert bases.size((2, 3), 1, 1) is None


@pytest.mark.parametrize("then", [True, False], ids=["initial", "no initial"])
@law(4)
@given(seed=SEEDS)
def test_tall_layers_are_measured_as_others(seed: int, then: bool) -> None:
    """9 outputs of 2 inputs: kept through 2 or 4 columns, and the numbers are those of the dense matrices."""
    model, x, y = network("tall", seed), inputs("tall", seed, 6), labels(6)
    before = network("tall", seed + 20_000)
    found = values(model, x, y, EVERY, initial=before.state_dict() if then else None)
    W, _, J = oracles.layer_io(model, x, "0")
    W0, _, J0 = oracles.layer_io(before, x, "0")
    assert len(W) > 2 * W.shape[1]
    for name, expected in oracles.nfa_measures(W, W0, J, J0).items():
        if then or name in ("nfc", "nfc_pearson", "nfc_diagonal"):
            assert found[name, "0"] == pytest.approx(expected, rel=1e-8), name
        else:
            assert math.isnan(found[name, "0"])


@law()
@given(seed=SEEDS, d=st.integers(1, 5))
def test_expected_gradient_products_are_those_of_the_definition(seed: int, d: int) -> None:
    x, A = normal(seed, 7, d), normal(seed + 1, d, 3)

    def target(x: Tensor) -> Tensor:
        return torch.cat([torch.sin(x @ A), x[:, :1] ** 2 * x[:, -1:]], 1)

    equal(egop(target, x), oracles.egop(target, x), 1e-12)
    equal(egop(lambda x: target(x)[:, 0], x), oracles.egop(lambda x: target(x)[:, 0], x), 1e-12)
    assert not egop(lambda x: x.sum(1) * 0 + 1, x).any()


# --------------------------------------------------------------------------------------------------------- any matrix


def both(function: Callable[..., Any], *given: Tensor) -> Any:
    """The result for tensors, after asserting that numpy gives the same, as numpy."""
    result, of_numpy = function(*given), function(*(a.numpy() for a in given))
    if isinstance(result, Tensor):
        assert isinstance(of_numpy, np.ndarray)
        equal(torch.from_numpy(of_numpy), result, 1e-14)
    else:
        assert isinstance(result, float)
        assert isinstance(of_numpy, float)
        assert of_numpy == pytest.approx(result, rel=1e-12, nan_ok=True)
    return result


@law(25)
@given(seed=SEEDS, n=st.integers(2, 8), rank=st.integers(1, 8), scale=st.floats(1e-12, 1e12))
def test_what_is_read_off_a_kernel_has_no_scale(seed: int, n: int, rank: int, scale: float) -> None:
    K, L, y, Y = semidefinite(seed, n, rank), semidefinite(seed + 1, n), normal(seed + 2, n), normal(seed + 3, n, 3)
    for target in (y, Y):
        assert both(kernels.alignment, K, target) == pytest.approx(oracles.alignment(K, target), rel=1e-10, abs=1e-13)
        assert kernels.alignment(scale * K, 3 * target) == pytest.approx(kernels.alignment(K, target), rel=1e-10)
    assert both(kernels.cka, K, L) == pytest.approx(oracles.cka(K, L), rel=1e-9)
    assert kernels.cka(scale * K, L) == pytest.approx(kernels.cka(K, L), rel=1e-10)
    assert kernels.cka(K, scale * K + 5) == pytest.approx(1.0, abs=1e-3 if scale < 1e-6 else 1e-6)
    assert both(kernels.stable_rank, K) == pytest.approx(oracles.stable_rank(K), rel=1e-10)
    assert kernels.stable_rank(scale * K) == pytest.approx(kernels.stable_rank(K), rel=1e-10)


@law(25)
@example(seed=0, n=5, scale=1e-9)
@given(seed=SEEDS, n=st.integers(2, 8), scale=st.floats(1e-12, 1e12))
def test_the_stable_rank_of_any_square_matrix(seed: int, n: int, scale: float) -> None:
    """|K|_F^2 / |K|_2^2, also of a matrix that is not symmetric or not semi-definite."""
    A = scale * normal(seed, n, n)
    assert kernels.stable_rank(A) == pytest.approx(oracles.stable_rank(A), rel=1e-10)
    assert kernels.stable_rank(A + A.T) == pytest.approx(oracles.stable_rank(A + A.T), rel=1e-10)
    assert kernels.stable_rank(-A @ A.T) == pytest.approx(oracles.stable_rank(A @ A.T), rel=1e-10)


def test_the_stable_rank_counts_equal_directions() -> None:
    for n, r in ((4, 1), (6, 3), (700, 5)):
        spectrum = torch.cat([torch.ones(r), torch.zeros(n - r)]).double()
        assert kernels.stable_rank(with_spectrum(spectrum)) == pytest.approx(r, rel=1e-10)


@law()
@given(seed=SEEDS, n=st.integers(20, 60), exponent=st.floats(0.2, 3.0), first=st.integers(1, 6))
def test_power_laws_are_slopes_of_logarithms(seed: int, n: int, exponent: float, first: int) -> None:
    k = torch.arange(1, n + 1).double()
    exact = (k**-exponent)[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]  # any order
    assert both(kernels.power_law, exact) == pytest.approx(exponent, rel=1e-9)
    noisy = (k**-exponent * torch.exp(0.1 * normal(seed, n))).sort(descending=True).values
    last = int(0.6 * n)
    for low, high, options in ((5, last, {}), (first, 15, {"first": first, "last": 15})):
        slope = np.polyfit(np.log(np.arange(low, high + 1)), np.log(noisy.numpy()[low - 1 : high]), 1)[0]
        assert kernels.power_law(noisy, **options) == pytest.approx(-slope, rel=1e-8)


@law()
@given(seed=SEEDS, k=st.integers(1, 4), n=st.integers(2, 6))
def test_specialisation_is_the_definition(seed: int, k: int, n: int) -> None:
    K, Y = torch.stack([semidefinite(seed + i, n) for i in range(k)]), normal(seed + 9, n, k)
    found = both(kernels.specialisation, K, Y)
    equal(found, oracles.specialisation(K, Y))
    equal(found.mean(0), torch.ones(k).double())


@EACH_OUTPUTS
def test_kernels_of_numpy_are_numpy(outputs: str) -> None:
    model, x = network("mlp", 0), inputs("mlp", 0)
    for K, of_numpy in (
        (kernels.ntk(model, x, form=outputs), kernels.ntk(model, x.numpy(), form=outputs)),
        (kernels.ntk(model, x, x[:3], form=outputs), kernels.ntk(model, x.numpy(), x[:3].numpy(), form=outputs)),
        *zip(*(kernels.ntk(model, t, form=outputs, per_layer=True).values() for t in (x, x.numpy())), strict=True),
        *((f(model, x, "2"), f(model, x.numpy(), "2")) for f in (
            kernels.ptk, kernels.forward_kernel, kernels.backward_kernel)),
    ):  # fmt: skip
        assert isinstance(K, Tensor)
        assert isinstance(of_numpy, np.ndarray)
        assert of_numpy.dtype == np.float64
        equal(torch.from_numpy(of_numpy), K, 1e-14)
