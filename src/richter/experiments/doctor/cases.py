"""Nineteen trainings of an MLP on digits, and five of a CNN, a GPT, a ResNet-10 and a ViT, whose truth is known from how they
are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FAILED = ("collapsed", "not learning")  # a network that answers every example alike has both faults


@dataclass(frozen=True)
class TrainingCase:
    """Settings of one training. ``words`` are the verdicts that these settings allow; if empty, the linearised network
    decides (truth.py)."""

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


UNTRAINED = TrainingCase(epochs=0.0, words=("untrained",))
DIVERGED = TrainingCase(lr=1e4, words=("diverged",))

MLP: Mapping[str, TrainingCase] = {
    "output scale 100": TrainingCase(alpha=100.0),
    "output scale 0.1": TrainingCase(alpha=0.1),
    "init x3": TrainingCase(init=3.0, lr=0.01),
    "init x5": TrainingCase(init=5.0, lr=0.001),
    "init x0.2": TrainingCase(init=0.2),
    "init x1e-4": TrainingCase(init=1e-4, words=FAILED),
    "Adam": TrainingCase(optimiser="adam", lr=1e-3),
    "Adam 1e-5": TrainingCase(optimiser="adam", lr=1e-5),
    "Adam 0.3": TrainingCase(optimiser="adam", lr=0.3),
    "SGD 0.1": TrainingCase(),
    "muP-like": TrainingCase(maximal=True),
    "wide": TrainingCase(width=8.0),
    "random labels": TrainingCase(optimiser="adam", lr=1e-3, epochs=2.0, random=True),
    "weight decay 0.1": TrainingCase(decay=0.1),
    "weight decay 0.3": TrainingCase(decay=0.3),
    "fine-tuning": TrainingCase(lr=0.01, pretrained=True, remark="fine-tuning"),
    "frozen backbone": TrainingCase(frozen=True, remark="frozen"),
    "untrained": UNTRAINED,
    "diverged": DIVERGED,
}
OTHERS: Mapping[str, TrainingCase] = {
    "lazy": TrainingCase(alpha=1000.0),
    "rich": TrainingCase(alpha=0.1),
    "frozen": TrainingCase(optimiser="adam", lr=1e-2, frozen=True, remark="frozen"),
    "untrained": UNTRAINED,
    "diverged": DIVERGED,
}
CASES = {"MLP": MLP, "CNN": OTHERS, "GPT": OTHERS, "ResNet-10": OTHERS, "ViT": OTHERS}
RATES = {"MLP": 0.1, "CNN": 0.1, "GPT": 0.3, "ResNet-10": 0.5, "ViT": 0.1}
# of SGD at an output scale of 1 or more; below, times the scale: else it diverges
SCALES = (0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)  # of the output
