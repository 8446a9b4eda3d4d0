"""Concepts of a text: planted topics come back in the order of their eigenvalues; scores against loops; the command and
its errors."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

import richter
from richter import cli
from richter.core import SelectionError
from richter.report.drawing import faults
from richter.tasks.cooccurrence import Counts, count
from richter.theory import word_embeddings as we
from richter.workflows.word_scores import analogies, signal, similarity
from richter.workflows.words import CorpusConcepts, save_vectors, words

TOPICS = {"sea": 30, "garden": 20, "kitchen": 13}


def planted_text(seed: int = 0, lines: int = 600) -> str:
    """Each line is of one topic, whose words begin with its name; a few words are of no topic."""
    draw = np.random.default_rng(seed)
    names = list(TOPICS)
    out = []
    for topic in draw.choice(names, lines):
        out.append(" ".join(f"{topic}{draw.integers(TOPICS[topic])}" if draw.random() < 0.9 else f"any{draw.integers(5)}"
                            for _ in range(12)))
    return "\n".join(out)


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> Counts:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(planted_text())
    return count(path, window=4, lines=True)


@pytest.fixture(scope="module")
def seen(counts: Counts) -> CorpusConcepts:
    return words(counts, dimensions=3)


def test_planted_topics_are_the_concepts(seen: CorpusConcepts, counts: Counts) -> None:
    """The largest two eigenvectors tell the three topics apart; every word of a topic lies nearer to its own than to others."""
    assert (np.diff(seen.eigenvalues) < 0).all()
    first = seen.poles(0, 5)
    assert {w.rstrip("0123456789") for w in first[0]} in ({"sea"}, {"garden"}, {"kitchen"})
    topics = np.array([w.rstrip("0123456789") for w in counts.words])
    W = seen.embeddings[:, :2] / np.linalg.norm(seen.embeddings[:, :2], axis=1, keepdims=True)
    centres = np.stack([W[topics == name].mean(0) for name in TOPICS])
    known = np.isin(topics, list(TOPICS))
    assert ((W @ centres.T).argmax(1)[known] == [list(TOPICS).index(t) for t in topics[known]]).all()


def test_times_are_those_of_random_embeddings(seen: CorpusConcepts, counts: Counts) -> None:
    """The typical start is that of random embeddings, averaged: times agree within a few per cent."""
    M = we.target_matrix(counts.joint, counts.unigram)
    drawn = [we.rise_times(seen.eigenvalues, we.starts(seen.vectors, seen.scale * np.random.default_rng(s).standard_normal(
        (len(counts.words), 3)))) for s in range(20)]
    np.testing.assert_allclose(np.mean(drawn, 0), seen.times, rtol=0.03)
    np.testing.assert_allclose(seen.embeddings, we.embed(M, 3), atol=1e-10)
    assert seen.square == pytest.approx((M.toarray() ** 2).sum())
    assert seen.order == [0, 1, 2]
    larger = words(counts, dimensions=3, scale=1e-2)
    assert (larger.times < seen.times).all()


def test_a_word_is_followed(seen: CorpusConcepts) -> None:
    followed = seen.follow("SEA3")
    assert followed.shares.sum() == pytest.approx(1)
    times = [followed.resolved(share) for share in (0.1, 0.5, 0.9)]
    assert times == sorted(times)
    squares = seen.growth(np.array(times))
    grown = (seen.vectors[followed.number, :, None] ** 2 * squares).sum(0)
    np.testing.assert_allclose(grown / (seen.embeddings[followed.number] ** 2).sum(), [0.1, 0.5, 0.9], rtol=1e-6)
    assert all(word.startswith("sea") for word in followed.neighbours(times[-1]))
    shown = str(followed)
    assert shown.startswith("'sea3' occurs")
    assert "neighbours then" in shown
    with pytest.raises(SelectionError, match=r"has no word 'seaa'. Close to it: 'sea"):
        seen.follow("seaa")


def test_what_is_printed_and_drawn(seen: CorpusConcepts) -> None:
    lines = str(seen).splitlines()
    assert lines[0].endswith("different pairs within 4 words")
    assert lines[2].split() == ["concept", "time", "eigenvalue", "loss", "words"]
    assert lines[3].split()[:2] == ["1", "1.00"]
    losses = [float(line.split()[3]) for line in lines[3:]]
    assert losses == sorted(losses, reverse=True)
    assert len(seen.shown(2).splitlines()) == 5
    assert faults(seen.plot()) == []
    assert [c["eigenvalue"] for c in seen.to_json()["concepts"]] == seen.eigenvalues.tolist()


def test_vectors_in_the_format_of_word2vec(seen: CorpusConcepts, tmp_path: Path) -> None:
    seen.save(tmp_path / "vectors.txt")
    head, *lines = (tmp_path / "vectors.txt").read_text().splitlines()
    assert head == f"{len(seen.counts.words)} 3"
    assert tuple(line.split()[0] for line in lines) == seen.counts.words
    np.testing.assert_allclose([[float(v) for v in line.split()[1:]] for line in lines], seen.embeddings, rtol=1e-5, atol=1e-8)
    gensim = pytest.importorskip("gensim.models")
    read = gensim.KeyedVectors.load_word2vec_format(tmp_path / "vectors.txt")
    np.testing.assert_allclose(read["sea3"], seen.embeddings[seen.counts.index("sea3")], rtol=1e-5, atol=1e-8)


def test_words_with_spaces_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(SelectionError, match="'new york' hold spaces"):
        save_vectors(tmp_path / "x.txt", ["new york"], np.ones((1, 2)))


@pytest.mark.parametrize(("options", "message"), [
    ({"dimensions": 500}, "500 dimensions for a vocabulary of 68 words"),
    ({"dimensions": 60}, r"60 dimensions were asked for, and M has \d+ eigenvalues above 0.*Take d="),
    ({"scale": 0.5}, "learned at once, and have no order"),
    ({"scale": -1.0}, "the size of initial embeddings, a number above 0"),
])
def test_bad_arguments(options: dict, message: str, counts: Counts) -> None:
    with pytest.raises(SelectionError, match=message):
        words(counts, **options)


# ------------------------------------------------------------------------------------------------ scores


def slow_answer(W: np.ndarray, a: int, b: int, c: int) -> int:
    unit = [w / np.linalg.norm(w) for w in W]
    target = unit[b] - unit[a] + unit[c]
    return max((i for i in range(len(W)) if i not in (a, b, c)), key=lambda i: float(unit[i] @ target))


def test_analogies_against_a_loop() -> None:
    draw = np.random.default_rng(0)
    names = [f"w{i}" for i in range(30)]
    W = draw.standard_normal((30, 5))
    rows = [tuple(int(i) for i in draw.choice(30, 4, replace=False)) for _ in range(40)]
    rows = [(a, b, c, slow_answer(W, a, b, c) if k % 2 else d) for k, (a, b, c, d) in enumerate(rows)]
    asked = [("odd" if k % 2 else "even", *(f"W{i}" for i in row)) for k, row in enumerate(rows)]
    scores = analogies(W, names, [*asked, ("odd", "w1", "w2", "w3", "unknown")])  # type: ignore[list-item]
    right = [slow_answer(W, a, b, c) == d for a, b, c, d in rows]
    assert scores.sections == {"even": (sum(right[::2]), 20), "odd": (20, 20)}
    assert scores.left_out == 1
    assert scores.accuracy == sum(right) / 40
    assert math.isnan(analogies(W, names, []).accuracy)


def test_similarity_is_a_rank_correlation() -> None:
    names = list("abcd")
    W = np.array([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [-1.0, 0.0]])
    pairs = [("A", "b", 9.0), ("a", "c", 5.0), ("a", "d", 0.0), ("a", "unknown", 3.0)]
    assert similarity(W, names, pairs) == pytest.approx(1)
    assert similarity(-W * np.array([[1.0], [1], [1], [-1]]), names, pairs) == pytest.approx(-0.5)
    assert math.isnan(similarity(W, names, pairs[:2]))
    with pytest.raises(SelectionError, match="give one row for each word"):
        similarity(W, names[:3], pairs)


def test_the_signal_of_task_vectors() -> None:
    W = np.zeros((8, 6))
    W[1::2, 0] = 1.0  # four parallel differences
    pairs = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert signal(W, pairs) == pytest.approx(1)  # of rank one: the largest is the mean
    W[1::2, 1:5] = 0.1 * np.eye(4)
    assert signal(W, pairs) == pytest.approx(4 * (4 + 0.01) / (4 * 1.01))
    W[1::2, 0] = 0
    assert signal(W, pairs) == pytest.approx(1)
    with pytest.raises(SelectionError, match="two or more"):
        signal(W, pairs[:1])


# ------------------------------------------------------------------------------------------------ the command


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(planted_text())
    ask = ["words", "text.txt", "--lines", "--window", "4", "--dimensions", "3", "--workers", "1"]
    assert cli.main([*ask, "--follow", "sea3", "--concepts", "2"]) == 0
    shown = capsys.readouterr().out
    assert "concept  time  eigenvalue" in shown
    assert "'sea3' occurs" in shown
    assert {p.name for p in Path("words").iterdir()} == {"counts", "vectors.txt", "words.svg", "words.pdf"}
    assert cli.main([*ask, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["concepts"]) == 3
    assert cli.main([*ask, "--follow", "nowhere"]) == 2
    assert "has no word 'nowhere'" in capsys.readouterr().err
    Path("binary.txt").write_bytes(b"PK\0\0")
    assert cli.main(["words", "binary.txt"]) == 2
    assert "it is a binary file" in capsys.readouterr().err
    assert cli.main(["words", "nothing.txt"]) == 2
    assert "nothing.txt is not a regular file" in capsys.readouterr().err


def test_words_is_a_workflow() -> None:
    assert richter.workflows.words is words
