"""FeatureMap: the diagonalised features of a layer as functions of inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from test_features import normal
from test_features_measured import Branches, Hidden, dead, network, read_by
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import richter
from richter.core import DataError, MemoryBudgetError, ProbeError, SelectionError
from richter.measures.features import FeatureMap, analyse


@pytest.fixture
def model() -> nn.Module:
    return network()


def test_features_are_uncorrelated_and_of_size_one_where_they_were_fitted(model: nn.Module) -> None:
    x = normal(40, 6)
    features = FeatureMap.fit(model, x)
    e = features.transform(x)
    assert features.layer == "4"
    assert isinstance(e, Tensor)
    assert torch.allclose(e.T @ e / 40, torch.eye(e.shape[1], dtype=torch.float64), atol=1e-10)
    a = analyse(read_by(model, x), torch.arange(40) % 3, model(x).detach())
    assert torch.allclose(features.intensity, a.intensity[:a.rank], rtol=1e-10)


def test_other_inputs_go_along_the_directions_of_the_fit(model: nn.Module) -> None:
    x, other = normal(40, 6), normal(9, 6, seed=3)
    features = FeatureMap.fit(model, x, layer="2")
    expected = read_by(model, other, "2") @ features.directions / features.intensity.sqrt()
    assert torch.allclose(features.transform(other), expected, rtol=1e-10)
    assert (features.directions.gather(0, features.directions.abs().argmax(0, keepdim=True)) > 0).all()  # of e and -e always one
    K = read_by(model, x, "2") @ read_by(model, x, "2").T
    e = features.transform(x)
    assert torch.allclose((e * features.intensity) @ e.T, K, rtol=0, atol=1e-10)


def test_numpy_in_numpy_out_and_a_probe_in_parts(model: nn.Module) -> None:
    x = normal(40, 6)
    features, parts = FeatureMap.fit(model, x.numpy()), FeatureMap.fit(model, richter.Probe(x, None, chunk=7))
    e = features.transform(x.numpy())
    assert isinstance(e, np.ndarray)
    assert torch.allclose(torch.from_numpy(e), parts.transform(richter.Probe(x, None, chunk=3)), atol=1e-9)


def test_a_layer_with_positions_has_features_at_each() -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Linear(12, 2)).double()
    x = normal(20, 6)
    features = FeatureMap.fit(model, x, layer="1")
    e = features.transform(x)
    patches = x.unfold(1, 3, 1)
    assert e.shape == (20, 4, 3)
    assert torch.allclose(e, patches @ features.directions / features.intensity.sqrt())
    assert torch.allclose(features.intensity.sum(), patches.square().sum() / 80)


def test_the_inputs_that_excite_a_feature_most(model: nn.Module) -> None:
    x = normal(30, 6)
    features = FeatureMap.fit(model, x)
    for k in (0, 2):
        order = features.transform(x)[:, k].abs().argsort(descending=True)
        assert features.strongest(x, k, 5) == order[:5].tolist()
    with pytest.raises(SelectionError, match="feature 9 of"):
        features.strongest(x, 9)


def test_saved_without_pickle_and_loaded(model: nn.Module, tmp_path: Path) -> None:
    x = normal(30, 6)
    features = FeatureMap.fit(model, x, layer="2")
    features.save(tmp_path / "map.npz")
    again = FeatureMap.load(tmp_path / "map.npz", model)
    assert torch.equal(again.transform(x), features.transform(x))
    assert again.layer == "2"
    np.save(tmp_path / "one.npy", np.ones(3))
    for name, content in (("text.npz", b"no"), ("empty.npz", b""), ("zip.npz", b"PK\x03\x04 and so on"), ("one.npy", None)):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match="contains no feature map"):
            FeatureMap.load(tmp_path / name, model)
    np.savez(tmp_path / "evil.npz", layer=np.array(["2"], dtype=object), directions=np.eye(2), intensity=np.ones(2))
    with pytest.raises(DataError, match="contains no feature map"):
        FeatureMap.load(tmp_path / "evil.npz", model)
    np.savez(tmp_path / "odd.npz", layer=np.array("2"), directions=np.eye(2), intensity=np.ones(3))
    with pytest.raises(DataError, match="each direction needs one positive intensity"):
        FeatureMap.load(tmp_path / "odd.npz", model)


def test_the_model_is_left_as_it_was(model: nn.Module) -> None:
    model.train()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    FeatureMap.fit(model, normal(20, 6)).transform(normal(5, 6))
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m._forward_hooks for m in model.modules())


@pytest.mark.parametrize(("make", "layer", "sentence"), [
    (Branches, None, r"2 layers write the outputs \(a, b\): choose one with layer="),
    (network, "9", "layer='9' reads no features. Layers that do: 0, 2, 4"), (dead, None, "reads zeros on every example"),
    (Hidden, None, "it reads NaN or Inf"),
])
def test_what_is_refused(make: type[nn.Module], layer: str | None, sentence: str) -> None:
    with pytest.raises(SelectionError, match=sentence):
        FeatureMap.fit(make().double(), normal(40, 6), layer)


class Tokens(nn.Module):
    """A network that reads token ids [n, T] and answers at each."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.table, self.first, self.head = nn.Embedding(7, 5), nn.Linear(5, 6), nn.Linear(6, 7)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=draw)
        self.double()

    def features(self, ids: Tensor) -> Tensor:
        return torch.relu(self.first(self.table(ids)))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.features(ids))


@pytest.mark.parametrize("chunk", [7, 256])
def test_masked_tokens_are_in_no_fit_and_excite_nothing(chunk: int) -> None:
    model, draw = Tokens(), torch.Generator().manual_seed(1)
    x, mask = torch.randint(7, (30, 6), generator=draw), torch.rand(30, 6, generator=draw) < 0.6
    probe = richter.Probe(x, None, mask=mask, chunk=chunk)
    features = FeatureMap.fit(model, probe)
    rows = model.features(x).detach()[mask]
    values = torch.linalg.eigvalsh(rows.T @ rows / len(rows)).flip(0)
    assert torch.allclose(features.intensity, values[:len(features.intensity)], rtol=1e-10)
    e = torch.as_tensor(features.transform(probe))
    assert torch.allclose(e[mask].T @ e[mask] / len(rows), torch.eye(e.shape[-1], dtype=torch.float64), atol=1e-9)
    assert not e[~mask].any()
    assert features.strongest(probe, 0, 3) == (e[..., 0].abs().amax(1)).argsort(descending=True, stable=True)[:3].tolist()


def test_fewer_examples_than_features_are_diagonalised_in_their_own_span() -> None:
    """Nothing of p x p is made, and memory= holds."""
    model = nn.Sequential(nn.Linear(6, 4000), nn.ReLU(), nn.Linear(4000, 2)).double()
    x = normal(20, 6)
    features = FeatureMap.fit(model, x, memory="10MiB")  # 4000 x 4000 numbers are 122 MiB
    h = torch.relu(model[0](x)).detach()
    U, s, _ = torch.linalg.svd(h.T, full_matrices=False)
    assert torch.allclose(features.intensity, s**2 / 20, rtol=1e-9)
    assert torch.allclose((features.directions * U).sum(0).abs(), torch.ones(20, dtype=torch.float64), rtol=1e-9)
    with pytest.raises(MemoryBudgetError, match=r"is too small for the 4,000 features of layer '2' on 20 rows: .* Give fewer"):
        FeatureMap.fit(model, x, memory="1MiB")
    with pytest.raises(MemoryBudgetError, match=r"on 5,000 rows"):
        FeatureMap.fit(model, normal(5000, 6), memory="100MiB")


@pytest.mark.parametrize("size", [7, 13, 64])
def test_a_loader_is_read_batch_by_batch(model: nn.Module, size: int) -> None:
    """Batches of one example too."""
    x = normal(40, 6)
    loader = DataLoader(TensorDataset(x, torch.arange(40) % 3), batch_size=size, shuffle=False)
    features, whole = FeatureMap.fit(model, loader), FeatureMap.fit(model, x)
    state = torch.random.get_rng_state()
    assert torch.allclose(features.intensity, whole.intensity, rtol=1e-9)
    assert torch.allclose(torch.as_tensor(features.transform(loader)), torch.as_tensor(whole.transform(x)), atol=1e-7)
    assert features.strongest(loader, 0, 4) == whole.strongest(x, 0, 4)
    with pytest.raises(MemoryBudgetError) as why:
        FeatureMap.fit(model, loader, memory=10)
    assert torch.equal(state, torch.random.get_rng_state()), why
    with pytest.raises(ProbeError, match="no example was given, but features are differences"):
        FeatureMap.fit(model, DataLoader(TensorDataset(x[:0], x[:0])))


def test_one_input_has_features_and_no_fit(model: nn.Module) -> None:
    x = normal(40, 6)
    features = FeatureMap.fit(model, x)
    assert torch.allclose(torch.as_tensor(features.transform(x[:1])), torch.as_tensor(features.transform(x))[:1], atol=1e-10)
    with pytest.raises(ProbeError, match="one example was given, but features are differences between examples"):
        FeatureMap.fit(model, x[:1])
    with pytest.raises(SelectionError, match="n=-1: the number of inputs must be at least 1"):
        features.strongest(x, n=-1)


def test_a_map_of_another_network_is_refused(model: nn.Module, tmp_path: Path) -> None:
    FeatureMap.fit(model, normal(30, 6), layer="2").save(tmp_path / "map.npz")
    other = nn.Sequential(nn.Linear(6, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    with pytest.raises(DataError, match=r"layer '2' of this model reads 3 features, but the map was fitted to \d+"):
        FeatureMap.load(tmp_path / "map.npz", other).transform(normal(5, 6))
