"""Print the BibTeX of an experiment, a measure, a theory or a paper."""

from __future__ import annotations

import argparse

from richter.commands.frame import Command


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("name", nargs="+")


def do(args: argparse.Namespace) -> int:
    from richter import experiments, measures, theory
    from richter.core import unknown
    from richter.core.values import bibtex, references
    papers = {name: name for name in references()}
    for facts in (measures.facts(), theory.CATALOGUE.facts(), experiments.CATALOGUE.facts()):
        papers = {**{name: entry["ref"].paper for name, entry in facts.items() if entry.get("ref")}, **papers}
    for name in args.name:
        if name not in papers:
            raise unknown("Richter", "paper, experiment, measure or theory", name, papers)
    print(bibtex(papers[name] for name in args.name))
    return 0


COMMAND = Command("cite", __doc__, do, arguments, group="reproduce papers", place=34, examples=(
    "richter cite nfa_fig1", "richter cite tangent_cka", "richter cite nfa signal > used.bib"))
