"""The list of the papers' figures, tables and theorems is whole, and every paper that is named can be cited."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest

import richter
from richter import experiments, measures, theory
from richter.core.catalogue import Facts

FOLDER = Path(richter.__file__).parent / "experiments"
PLACES = json.loads((FOLDER / "catalogue.json").read_text(encoding="utf-8"))
REFERENCES = json.loads((FOLDER.parent / "core" / "references.json").read_text(encoding="utf-8"))

# (paper, kind, chapter): the last number that the paper has; figures of a thesis are numbered within chapters
LAST = {
    ("nfa", "Fig.", ""): 17,
    ("rapid", "Fig.", ""): 7,
    ("signal", "Fig.", ""): 23, ("signal", "Table", ""): 4,
    **{("layerwise", "Fig.", chapter): n for chapter, n in
       {"1": 5, "2": 5, "3": 6, "4": 3, "5": 2, "6": 5, "7": 7, "C": 3}.items()},
    **{("layerwise", "Table", chapter): n for chapter, n in {"2": 2, "4": 2, "5": 1, "6": 1}.items()},
    ("doctor", "Table", ""): 2, ("doctor", "Fig.", ""): 1,
}
# theorems and the like, whose numbers have gaps: definitions, examples and remarks are counted with them
RESULTS = {
    "nfa": ("Prop. 2", "Prop. 3", "Prop. 4", "Prop. 8", "Sec. 5", "App. F"),
    "rapid": tuple(f"Eq. {n}" for n in (*range(5, 15), 20, 27, 35, 43)),
    "signal": ("Thm. 1", "Thm. 2", "Cor. 1", "App. A.4", "Thm. A", "Approx. 1", "App. C", "App. D", "Eq. 25", "Eqs 26, 27",
               "Alg. 1"),
    "layerwise": ("Alg. 1", "Prop. 2.5.1", "Prop. 2.5.2", "Prop. 2.5.3", "Thm. 1", "App. A.2", "App. A.2.1", "App. A.2.2",
                  "App. A.2.3", "Sec. 3.5.1", "Sec. 3.5.2", "Lemma 1", "Cor. B.1.1", "Cor. B.1.2", "Lemma 2", "Lemma 3",
                  "Prop. B.1.1", "Prop. B.1.2", "Eq. 1.26", "Eq. 1.36", "Sec. 1.6.1"),
    "escape": ("Example 1", "Sec. 3", "Thm. 3.1", "Prop. 3.2", "Prop. 3.3", "Prop. 3.4", "Experiments, first escape",
               "Experiments, saddles"),
    "eigenlearning": ("Sec. 2, 3", "Thm. 1", "Thm. 2", "Cor. 1", "Sec. 5", "Learning curves"),
    "overfitting": ("Thm. 1", "Sec. 3", "Thms. 2-5", "Thm. 6", "Inner-product kernels"),
    "agf": ("Algorithm 1", "Theorem 3.1", "Sec. 4", "Conjecture 4.1", "Sec. 5", "Sec. 6"),
}
MISSING: dict[tuple[str, str], str] = {}  # (paper, place): why a number within the sequence is not there
UNNUMBERED = {("layerwise", "App. C.3, table"): "printed without a number or a caption"}


def name(entry: dict) -> str:
    return f"{entry['paper']}, {entry['place']}"


@pytest.mark.parametrize("entry", PLACES, ids=name)
def test_an_entry_is_complete(entry: dict) -> None:
    assert {"paper", "place", "title", "data"} <= set(entry) <= {"paper", "place", "title", "data", "parts", "nothing"}
    assert entry["paper"] in REFERENCES
    assert 0 < len(entry["title"]) <= 100
    assert entry["title"].endswith(".")
    for names in (entry["data"], entry.get("parts", [])):
        assert all(isinstance(x, str) and x for x in names)
        assert len(set(names)) == len(names)
    assert entry.get("parts", ["one"]), "leave parts out rather than empty"
    assert "nothing" not in entry or (not entry["data"] and entry["nothing"].endswith("."))


def test_places_are_unique_and_papers_stay_together() -> None:
    assert [p for p, n in Counter(map(name, PLACES)).items() if n > 1] == []
    papers = [e["paper"] for e in PLACES]
    assert papers == sorted(papers, key=papers.index)


def test_the_numbering_has_no_gaps() -> None:
    numbers: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for entry in PLACES:
        if (entry["paper"], entry["place"]) in UNNUMBERED or entry["place"] in RESULTS.get(entry["paper"], ()):
            continue
        parsed = re.fullmatch(r"(Fig\.|Table) (?:([0-9A-Z])\.)?([0-9]+)", entry["place"])
        assert parsed, name(entry)
        kind, chapter, number = parsed.groups(default="")
        numbers[entry["paper"], kind, chapter].append(int(number))
    expected = {(paper, kind, chapter): [n for n in range(1, last + 1)
                                         if (paper, f"{kind} {chapter}{'.' * bool(chapter)}{n}") not in MISSING]
                for (paper, kind, chapter), last in LAST.items()}
    assert numbers == expected  # in the order of the text too
    for paper, results in RESULTS.items():
        assert tuple(e["place"] for e in PLACES if e["paper"] == paper)[-len(results):] == results
    assert set(UNNUMBERED) <= {(e["paper"], e["place"]) for e in PLACES}


@pytest.mark.parametrize("facts", [experiments.CATALOGUE.facts, measures.facts, theory.CATALOGUE.facts],
                         ids=["experiments", "measures", "theories"])
def test_every_paper_that_is_named_has_a_reference(facts: Callable[[], dict[str, Facts]]) -> None:
    named = {entry["ref"].paper for entry in facts().values()}
    assert named
    assert named <= set(REFERENCES)


def fields(bibtex: str) -> tuple[str, dict[str, str]]:
    """The key and the fields of one entry whose values are all in braces."""
    head = re.match(r"@[a-z]+\{([^,\s]+),\s*", bibtex)
    assert head, bibtex
    values, at = {}, head.end()
    while bibtex[at:].strip() != "}":
        field = re.compile(r"\s*([A-Za-z]+)\s*=\s*\{").match(bibtex, at)
        assert field, bibtex[at:]
        depth, end = 1, field.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(bibtex[end], 0)
            end += 1
        assert field[1].lower() not in values, f"{field[1]} is given twice"
        values[field[1].lower()] = bibtex[field.end():end - 1]
        at = end + (bibtex[end] == ",")
    return head[1], values


@pytest.mark.parametrize("paper", REFERENCES)
def test_a_reference_can_be_cited(paper: str) -> None:
    reference = REFERENCES[paper]
    bibtex = reference["bibtex"]
    assert bibtex.count("{") == bibtex.count("}")
    assert bibtex.isascii()
    key, values = fields(bibtex)
    assert key == paper
    assert values["title"].strip("{}") == reference["title"]
    assert values["year"] == str(reference["year"])
    assert len(values["author"].split(" and ")) == len(reference["authors"])
    for written, plain in zip(values["author"].split(" and "), reference["authors"], strict=True):
        last, first = written.split(", ")
        assert plain.startswith(first)
        assert "{" in last or plain == f"{first} {last}"
