"""Random models of a grammar: every number is that of the definition or refused with a sentence, and nothing is changed."""

from __future__ import annotations

import pytest

import fuzz_models
from fuzz_compare import Outcome, Tally, examine

QUICK, MANY = range(30), range(30, 2050)
PARTS = 8  # of the long tests, so that a failure is seen early
REFUSED = 0.05  # at most, of models and of maps

pytestmark = pytest.mark.filterwarnings("ignore")


def failures(outcomes: list[Outcome]) -> str:
    """What went wrong, model by model."""
    return "\n".join(str(o) for o in outcomes if o.failed)


@pytest.mark.parametrize("seed", range(12))
def test_models_without_tricks_are_right(seed: int) -> None:
    """Where everything is plain the definition and the instrument agree: both can be trusted."""
    outcome = examine(fuzz_models.build(seed, plain=True))
    assert not outcome.failed, str(outcome)
    assert not outcome.refused, str(outcome)
    assert outcome.right


@pytest.mark.parametrize("seed", QUICK)
def test_a_random_model_is_measured_right_or_refused(seed: int) -> None:
    outcome = examine(fuzz_models.build(seed))
    assert not outcome.failed, str(outcome)


@pytest.mark.long
@pytest.mark.parametrize("name", fuzz_models.singles())
def test_every_block_alone_is_measured_right_or_refused(name: str) -> None:
    outcomes = [examine(fuzz_models.build(seed, compose=fuzz_models.singles()[name])) for seed in range(5)]
    assert not failures(outcomes), failures(outcomes)


@pytest.mark.long
@pytest.mark.parametrize("part", range(PARTS))
def test_no_random_model_is_silently_wrong_and_few_are_refused(part: int) -> None:
    tally = Tally([examine(fuzz_models.build(seed)) for seed in MANY[part::PARTS]])
    print(tally)
    assert not failures(tally.outcomes), f"{tally}\n{failures(tally.outcomes)}"
    assert tally.refused_models < REFUSED, str(tally)
    assert tally.refused_maps < REFUSED, str(tally)


def test_a_seed_gives_the_same_model_every_time() -> None:
    one, two = fuzz_models.build(3), fuzz_models.build(3)
    assert one.text == two.text
    assert all(a.equal(b) for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True))


@pytest.mark.long
def test_the_grammar_reaches_every_block() -> None:
    """Within the seeds of the long tests each kind of block occurs, and so does each kind of input and output."""
    texts = " ".join(fuzz_models.build(seed).text for seed in range(0, 2050, 5))
    names = {name.partition("[")[0].partition("(")[0] for name in fuzz_models.singles()}
    assert not [name for name in names if name not in texts and name not in ("Normed", "Recurrent", "ImageNorm")]
    for word in ("_norm Normed", "LSTM", "GRU", "BatchNorm2d", "MIXING", "tied", "frozen", "returns dict", "reads x s"):
        assert word in texts, word
