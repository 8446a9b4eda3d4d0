"""One rule for functions of arrays: torch in, torch out; anything else that is array-like in, numpy out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor

from richter import kernels, learners
from richter.core import SelectionError
from richter.core.arrays import fingerprint, like, to_tensor
from richter.kernels import dynamics, infinite
from richter.models import mlp
from richter.theory import early_time, ofe

X = np.random.default_rng(0).standard_normal((6, 3))
A = np.random.default_rng(1).standard_normal((6, 2))
SYMMETRIC = X @ X.T
PAIR = np.stack([SYMMETRIC, SYMMETRIC ** 2])

ARRAYS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "infinite.ntk": (lambda x: infinite.ntk(x, depth=2), (X,)),
    "infinite.ntk of two": (lambda x, z: infinite.ntk(x, z, depth=1), (X, X[:2])),
    "infinite.nngp": (lambda x: infinite.nngp(x, depth=2), (X,)),
    "theory.expected_kernel": (lambda x: early_time.expected_kernel(x, "relu"), (X,)),
    "kernels.specialisation": (kernels.specialisation, (PAIR, A)),
    "dynamics, loss": (lambda K, y: dynamics.kernel_gradient_descent(K, y, 0.01, 5).loss, (SYMMETRIC, A)),
    "dynamics, residual": (lambda K, y: dynamics.kernel_gradient_flow(K, y, 0.01, [0, 5]).residual, (PAIR, A)),
    "dynamics, power": (lambda K, y: dynamics.spectrum(K, y).power[:3], (SYMMETRIC, A)),  # the others are of zero eigenvalues
    "dynamics.effective_gammas": (dynamics.effective_gammas, (PAIR, 2 * PAIR + 1, A)),
    "ofe, kernel": (lambda K, y: ofe.OptimalFeatureEvolution(K, y, 0.5).kernel([1.0]), (SYMMETRIC, A[:, 0])),
    "a learner's kernel": (learners.Laplace(2.0), (X,)),
    "its gradients": (learners.Laplace(2.0).gradients, (X, X[:2])),
    "learners.agop": (lambda x, a: learners.agop(learners.Laplace(2.0), x, a), (X, A)),
    "learners.fact": (lambda x, a: learners.fact(learners.Laplace(2.0), x, a), (X, A)),
}
NUMBERS: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...]]] = {
    "kernels.alignment": (kernels.alignment, (SYMMETRIC, A)),
    "dynamics.rotation": (dynamics.rotation, (SYMMETRIC, SYMMETRIC ** 2)),
    "dynamics.effective_gamma": (dynamics.effective_gamma, (SYMMETRIC, SYMMETRIC + 1, A)),
    "kernels.cka": (kernels.cka, (SYMMETRIC, SYMMETRIC ** 2)),
    "kernels.stable_rank": (kernels.stable_rank, (SYMMETRIC,)),
    "kernels.power_law": (lambda v: kernels.power_law(v, first=1, last=6), (np.arange(1.0, 7) ** -1.5,)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_kind_that_goes_in_comes_out(name: str, device: str) -> None:
    function, given = ARRAYS[name]
    expected = function(*given)
    assert isinstance(expected, np.ndarray)
    assert expected.dtype == np.float64
    listed = function(*(a.tolist() for a in given))
    assert isinstance(listed, np.ndarray)
    assert np.array_equal(listed, expected)
    found = function(*(torch.from_numpy(a).to(device) for a in given))
    assert isinstance(found, Tensor)
    assert found.device.type == device
    np.testing.assert_allclose(found.cpu().numpy(), expected, rtol=1e-12, atol=1e-12)
    mixed = function(torch.from_numpy(given[0]).to(device), *(a.tolist() for a in given[1:]))
    assert isinstance(mixed, Tensor)  # the first array decides
    assert mixed.device.type == device


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_kernels_are_of_any_kind_of_array(name: str) -> None:
    function, given = NUMBERS[name]
    expected = function(*given)
    assert isinstance(expected, float)
    assert function(*(a.tolist() for a in given)) == expected
    assert function(*map(torch.from_numpy, given)) == expected


def test_a_data_frame_is_array_like() -> None:
    K = infinite.ntk(pd.DataFrame(X), depth=1)
    assert isinstance(K, np.ndarray)
    assert np.array_equal(K, infinite.ntk(X, depth=1))


@pytest.mark.parametrize("wrapped", [lambda a: a, lambda a: (a,), lambda a: [a], lambda a: {"x": a}],
                         ids=["alone", "tuple", "list", "dict"])
def test_inputs_of_a_model_decide_too(wrapped: Callable[[Any], Any]) -> None:
    model, x = mlp([3, 4, 2], seed=0), torch.from_numpy(X).float()
    if isinstance(wrapped(0), dict):
        model.forward = lambda x: torch.nn.Sequential.forward(model, x)  # type: ignore[method-assign]
    assert isinstance(kernels.ntk(model, wrapped(x)), Tensor)
    assert isinstance(kernels.ntk(model, wrapped(x.numpy())), np.ndarray)


def test_what_torch_cannot_share_is_copied(recwarn: pytest.WarningsRecorder) -> None:
    """Arrays that are read-only, as pandas gives them, or run backwards."""
    fixed = X.copy()
    fixed.flags.writeable = False
    for a in (fixed, X[::-1], X[:, ::-1], fixed[::-2]):
        assert np.array_equal(to_tensor(a).numpy(), a)
    assert not len(recwarn)
    assert to_tensor(X).data_ptr() == X.ctypes.data


def test_what_holds_no_numbers_is_named() -> None:
    for bad, sentence in (([[1.0], [1.0, 2.0]], "x is a list that cannot be read as numbers"),
                          ({"a": 1}, "x is a dict that cannot be read as numbers"),
                          (["one"], "x is a list that cannot be read as numbers"),
                          ([torch.ones(2, requires_grad=True)], "x is a list that cannot be read as numbers"),
                          ([1.0, np.nan], "x contains NaN or Inf"), ([1j], "x is complex")):
        with pytest.raises(SelectionError, match=sentence):
            to_tensor(bad, "x")


def test_an_empty_argument_is_no_tensor() -> None:
    assert isinstance(like(torch.zeros(2), ()), np.ndarray)
    assert isinstance(like(torch.zeros(2), [[], torch.zeros(1)]), np.ndarray)


def test_a_fingerprint_is_of_every_tensor_inside() -> None:
    a, b = torch.arange(6.0), torch.arange(6.0) + 1
    nested = {"ids": a, "more": (b, [a, torch.tensor(3)])}
    assert fingerprint(nested) == fingerprint({"ids": a.clone(), "more": (b.clone(), [a.clone(), torch.tensor(3)])})
    others = ({**nested, "more": (b, [b, torch.tensor(3)])}, {**nested, "more": (b, [a, torch.tensor(4)])}, a, b,
              a.reshape(2, 3), a.double(), (a, b), (b, a))
    assert len({fingerprint(x) for x in (nested, *others)}) == 1 + len(others)
