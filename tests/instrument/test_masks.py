"""Tokens: masked positions and tokens without a label enter no sum."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import oracles
import richter
from observing import FEW, assert_close, gpt, heads, lengths


def nfc_by_hand(model: nn.Module, x: Tensor, name: str, outputs: Tensor, positions: Tensor) -> float:
    """rho(W^T W, W^T K W), K = sum of g g^T over real outputs [n,T] and over real positions [n,T] of the layer."""
    W, _, J = oracles.layer_io(model, x, name)
    (n, k, s, _), T = J.shape, outputs.shape[1]
    K = torch.zeros(len(W), len(W), dtype=torch.float64)
    for i in range(n):
        for o in range(k):
            for p in range(s):
                if outputs[i, o // (k // T)] and positions[i, p // (s // T)]:
                    K += torch.outer(J[i, o, p], J[i, o, p])
    return oracles.cosine(W.T @ W, W.T @ K @ W)


def tangent_by_hand(K: Tensor, y: Tensor, real: Tensor) -> dict[str, float]:
    """tangent_cka, tangent_alignment of K[n,k,n,k] from the outputs of real tokens alone."""
    (n, k), T = K.shape[:2], real.shape[1]
    Y = torch.zeros(n, T, k // T, dtype=torch.float64)
    for i, t in real.nonzero().tolist():
        Y[i, t, y[i, t]] = 1.0
    keep = real[..., None].expand(Y.shape).flatten()
    y_kept = Y.flatten()[keep]
    C = oracles.centring(len(y_kept))
    Kc, yc = C @ K.reshape(n * k, n * k)[keep][:, keep] @ C, C @ y_kept
    values = []
    for c in range(k):
        rows = real[:, c // (k // T)]
        label = Y.reshape(n, k)[rows, c]
        if label.norm() > 0:
            values.append(oracles.alignment(K[rows, c][:, rows, c], label))
    cka = float(yc @ Kc @ yc / (Kc.norm() * (yc @ yc)))
    return {"tangent_cka": cka, "tangent_alignment": sum(values) / len(values)}


@pytest.mark.parametrize("name", ["first", "head", "readout"])
def test_masked_positions_enter_no_sum(name: str) -> None:
    """A model that works on each token: real tokens alone, whatever stands in the others."""
    model, x, y = heads()
    mask = lengths(12, 4)
    snap = richter.measure(model, richter.Probe(x, y, mask=mask))
    assert snap.value("nfc", name) == pytest.approx(nfc_by_hand(model, x, name, mask, mask), rel=1e-9)
    by_hand = tangent_by_hand(oracles.tangent_kernels(model, x)[name], y, mask)
    for m, value in by_hand.items():
        assert snap.value(m, name) == pytest.approx(value, rel=1e-9)
    garbage, labels = torch.where(mask[..., None], x, 1.5 * x.roll(1, 0) + 0.5), torch.where(mask, y, 2)
    padded = richter.measure(model, richter.Probe(garbage, labels, mask=mask))
    unmasked = richter.measure(model, richter.Probe(garbage, labels))
    for m in (*FEW, "tangent_alignment"):
        assert padded.value(m, name) == pytest.approx(snap.value(m, name), rel=1e-9)
        assert padded.error(m, name) == pytest.approx(snap.error(m, name), rel=1e-6, abs=1e-12)
        if name != "readout" or m != "nfc":
            assert abs(unmasked.value(m, name) - snap.value(m, name)) > 1e-4


@pytest.mark.parametrize("name", ["first", "head", "readout"])
def test_masking_the_end_is_cutting_it_off(name: str) -> None:
    model, x, y = heads()
    mask = (torch.arange(4) < 2).expand(12, 4)
    masked = richter.measure(model, richter.Probe(x, y, mask=mask))
    cut = richter.measure(model, richter.Probe(x[:, :2], y[:, :2]))
    for m in (*FEW, "tangent_alignment", "tangent_cka"):
        assert masked.value(m, name) == pytest.approx(cut.value(m, name), rel=1e-9)
        assert masked.error(m, name) == pytest.approx(cut.error(m, name), rel=1e-5, abs=1e-12)


GPT_LAYERS = ["transformer.h.0.attn.c_attn.v", "transformer.h.0.mlp.c_fc", "transformer.h.1.mlp.c_proj"]


def test_a_causal_model_padded_at_the_end() -> None:
    """Padding behind the text reaches no real output: garbage there changes nothing."""
    model, x, y = gpt()
    mask = lengths(8, 4)
    ids = torch.where(mask, x, (x + 3) % 7)
    snap, other = (richter.measure(model, richter.Probe(i, y, mask=mask)) for i in (x, ids))
    for name in GPT_LAYERS:
        assert snap.value("nfc", name) == pytest.approx(nfc_by_hand(model, x, name, mask, mask), rel=1e-8)
    K = oracles.tangent_kernels(model, x)
    for name in ("transformer.h.0.mlp.c_fc", "transformer.ln_f"):
        for m, value in tangent_by_hand(K[name], y, mask).items():
            assert snap.value(m, name) == pytest.approx(value, rel=1e-8)
    for m, value in tangent_by_hand(torch.stack(list(K.values())).sum(0), y, mask).items():
        assert snap.value(m) == pytest.approx(value, rel=1e-8)
    assert_close(snap, other, rel=1e-8)


def test_a_causal_model_padded_at_the_front() -> None:
    """Padding before the text is read by real tokens; what is asked of it enters no feature matrix."""
    model, x, y = gpt()
    mask = lengths(8, 4, left=True)
    snap = richter.measure(model, richter.Probe(x, y, mask=mask), ["nfc"])
    for name in GPT_LAYERS:
        expected = nfc_by_hand(model, x, name, mask, mask)
        assert snap.value("nfc", name) == pytest.approx(expected, rel=1e-8)
    name = "transformer.h.0.attn.c_attn.v"
    everywhere = nfc_by_hand(model, x, name, mask, torch.ones_like(mask))
    assert abs(everywhere - snap.value("nfc", name)) > 1e-6  # here it makes a difference


@pytest.mark.parametrize("ignore_index", [-100, -1])
def test_tokens_without_a_label(ignore_index: int) -> None:
    """Their outputs count neither for features nor for kernels."""
    model, x, y = heads()
    real = lengths(12, 4).roll(1, 1)
    labels = torch.where(real, y, ignore_index)
    snap = richter.measure(model, richter.Probe(x, labels, ignore_index=ignore_index))
    K = oracles.tangent_kernels(model, x)
    for name in ("first", "head", "readout"):
        expected = nfc_by_hand(model, x, name, real, torch.ones_like(real))
        assert snap.value("nfc", name) == pytest.approx(expected, rel=1e-9)
        for m, value in tangent_by_hand(K[name], y, real).items():
            assert snap.value(m, name) == pytest.approx(value, rel=1e-9)


def test_a_mask_and_missing_labels_together() -> None:
    model, x, y = heads()
    mask, labelled = lengths(12, 4), torch.ones(12, 4, dtype=torch.bool)
    labelled[::2, 0] = False
    both = richter.measure(model, richter.Probe(x, torch.where(labelled, y, -100), mask=mask))
    K = oracles.tangent_kernels(model, x)
    for m, value in tangent_by_hand(K["first"], y, mask & labelled).items():
        assert both.value(m, "first") == pytest.approx(value, rel=1e-9)
