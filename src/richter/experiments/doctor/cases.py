"""Nineteen trainings of an MLP on digits, and five of a CNN and of a GPT, whose truth is known from how they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FAILED = ("collapsed", "not learning")  # a network that answers every example alike has both faults


@dataclass(frozen=True)
class Case:
    """One training. ``words`` are the verdicts that its making allows; empty: the linearised network decides (truth.py)."""

    alpha: float = 0.0  # output scale: f = alpha (h(w) - h(w0)), loss / alpha^2; 0: f = h
    init: float = 1.0  # torch's initial weights times this
    width: float = 1.0
    optimiser: str = "sgd"
    lr: float = 0.0  # 0: that of RATES
    decay: float = 0.0
    epochs: float = 1.0  # times those of the settings
    random: bool = False  # labels
    pretrained: bool = False  # on one half of the training set; then trained on the other
    frozen: bool = False  # all but the read-out
    maximal: bool = False  # read-out and learning rates by width as in the maximal-update parametrisation
    words: tuple[str, ...] = ()
    remark: str = ""  # that the verdict must make besides, by its first word


UNTRAINED = Case(epochs=0.0, words=("untrained",))
DIVERGED = Case(lr=1e4, words=("diverged",))

MLP: Mapping[str, Case] = {
    "output scale 100": Case(alpha=100.0),
    "output scale 0.1": Case(alpha=0.1),
    "init x3": Case(init=3.0, lr=0.01),
    "init x5": Case(init=5.0, lr=0.001),
    "init x0.2": Case(init=0.2),
    "init x1e-4": Case(init=1e-4, words=FAILED),
    "Adam": Case(optimiser="adam", lr=1e-3),
    "Adam 1e-5": Case(optimiser="adam", lr=1e-5),
    "Adam 0.3": Case(optimiser="adam", lr=0.3),
    "SGD 0.1": Case(),
    "muP-like": Case(maximal=True),
    "wide": Case(width=8.0),
    "random labels": Case(optimiser="adam", lr=1e-3, epochs=2.0, random=True),
    "weight decay 0.1": Case(decay=0.1),
    "weight decay 0.3": Case(decay=0.3),
    "fine-tuning": Case(lr=0.01, pretrained=True, remark="fine-tuning"),
    "frozen backbone": Case(frozen=True, remark="frozen"),
    "untrained": UNTRAINED,
    "diverged": DIVERGED,
}
OTHERS: Mapping[str, Case] = {
    "lazy": Case(alpha=1000.0),
    "rich": Case(alpha=0.1),
    "frozen": Case(optimiser="adam", lr=1e-2, frozen=True, remark="frozen"),
    "untrained": UNTRAINED,
    "diverged": DIVERGED,
}
CASES = {"MLP": MLP, "CNN": OTHERS, "GPT": OTHERS}
RATES = {"MLP": 0.1, "CNN": 0.1, "GPT": 0.3}  # of SGD at an output scale of 1 or more; below, times the scale: else it diverges
SCALES = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)  # of the output
