"""list, run, check, ledger, cite: the papers' figures as experiments with claims."""

from __future__ import annotations

import argparse
import fnmatch
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from richter.commands import Commands, as_json, command
from richter.core.text import table
from richter.runs.reader import default_store

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment
    from richter.experiments.running import Checked, Finding


def add(commands: Commands) -> None:
    p = command(commands, "list", "list experiments with their cost at each scale, and measures with their references", _list,
                ["richter list", "richter list measures", "richter list experiments --json"])
    p.add_argument("what", nargs="?", choices=("experiments", "measures"), help="only these")
    p.add_argument("--json", action="store_true", help="for machines")
    p = command(commands, "run", "run one experiment and show its claims and figures", _run,
                ["richter run nfa_fig1", "richter run nfa_fig1 --scale paper --workers 2",
                 "richter run nfa_fig1 --set steps=400 --set seeds=0,1"])
    p.add_argument("name")
    _common(p)
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a setting; may be repeated")
    p.add_argument("--record", action="store_true", help="keep the result in the ledger (for developers)")
    p = command(commands, "check", "run experiments and compare each claim with its bar; exit 1 if one fails", _check,
                ["richter check", "richter check 'nfa_*' --controls",
                 "richter check --start                 # one step of each at the paper's scale"])
    p.add_argument("pattern", nargs="?", default="*", help="names of experiments, e.g. 'nfa_*' (default: all)")
    _common(p)
    p.add_argument("--controls", action="store_true", help="also run the case on which each claim must fail")
    p.add_argument("--start", action="store_true", help="only see that the paper's scale of each starts: one step")
    p.add_argument("--record", action="store_true", help="keep the results in the ledger (for developers)")
    p = command(commands, "ledger", "write the page that says what became of every figure and table", _ledger,
                ["richter ledger -o docs/claims.md"])
    p.add_argument("-o", "--output", type=Path, help="the file (default: print)")
    p = command(commands, "cite", "print the BibTeX of an experiment, a measure or a paper", _cite,
                ["richter cite nfa_fig1", "richter cite tangent_cka", "richter cite nfa signal > used.bib"])
    p.add_argument("name", nargs="+")


def _common(p: argparse.ArgumentParser) -> None:
    p.add_argument("--scale", choices=("smoke", "paper"), default="smoke", help="a minute at most, or the paper's own sizes")
    p.add_argument("--store", type=Path, default=default_store(), help="where runs are kept (default: RICHTER_RUNS, or runs)")
    p.add_argument("--workers", type=int, default=1, help="processes")
    p.add_argument("--fresh", action="store_true", help="run again what was finished before")
    p.add_argument("--json", action="store_true", help="for machines")


def _list(given: argparse.Namespace) -> int:
    from richter import experiments
    from richter.core import show_bytes
    from richter.experiments.ledger import records
    from richter.measures import DEFAULT, catalogue
    known = [] if given.what == "measures" else [experiments.get(name) for name in experiments.names()]
    measures = {} if given.what == "experiments" else catalogue()
    found = records()
    if given.json:
        print(as_json({"experiments": [{"name": e.name, "ref": str(e.ref), "title": e.title, "data": e.data,
                                        "more_data": e.more_data, "cost": {
            scale: {k: found[e.name, scale][k] for k in ("cpu_minutes", "memory")}
            for scale in ("smoke", "paper") if (e.name, scale) in found}} for e in known],
            "measures": [{"name": name, "ref": str(m.ref), "default": name in DEFAULT} for name, m in measures.items()]}))
        return 0

    def cost(name: str, scale: str) -> str:
        r = found.get((name, scale))
        return f"{r['cpu_minutes']:.1f} min, {show_bytes(r['memory'])}" if r else "not run yet"

    if known:
        print(table([("experiment", "where", "smoke", "paper", "data", "what"), *(
            (e.name, str(e.ref), cost(e.name, "smoke"), cost(e.name, "paper"), _needs(e), e.title)
            for e in known)]))
    if known and measures:
        print()
    if measures:
        said = {k: (m.compute.__doc__ or "").split("  [")[0].split("\n")[0] for k, m in measures.items()}
        print(table([("  measure", "where", "what"),
                     *((f"{'*' if k in DEFAULT else ' '} {k}", str(m.ref), said[k]) for k, m in measures.items())]))
        print("\n* measured by default")
    return 0


def _run(given: argparse.Namespace) -> int:
    from richter.experiments import get
    e = get(given.name)
    return _several([e], given, e.parsed(given.set))


def _check(given: argparse.Namespace) -> int:
    from richter.core import unknown
    from richter.experiments import get, names
    chosen = fnmatch.filter(names(), given.pattern)
    if not chosen:
        raise unknown("Richter", "experiment", given.pattern, names())
    known = [get(name) for name in chosen]
    return _started(known, given) if given.start else _several(known, given, {})


def _started(known: Iterable[Experiment], given: argparse.Namespace) -> int:
    from richter.core import RichterError
    from richter.experiments.running import start
    failed = False
    for e in known:
        if (lacking := _lacking(e, "paper")):
            print(f"{e.name}: skipped, {lacking}")
            continue
        try:
            start(e, given.store)
            print(f"{e.name}: starts at the paper's scale")
        except RichterError as why:
            failed = True
            print(f"{e.name}: does not start. {why}")
    return int(failed)


def _several(known: Iterable[Experiment], given: argparse.Namespace, changes: Mapping[str, Any]) -> int:
    from richter.core import RichterError, SelectionError
    from richter.experiments.ledger import keep
    from richter.experiments.running import check, controls, summarise
    if given.record and changes:
        raise SelectionError("the ledger keeps results of the settings as they are: leave --set or --record out.")
    store, failed, found = given.store, False, list[dict[str, Any]]()
    for e in known:
        if (lacking := _lacking(e, given.scale)) and given.command == "check":
            print(f"{e.name}: skipped, {lacking}", file=sys.stderr)
            found.append({"experiment": e.name, "skipped": lacking})
            continue
        try:
            c = check(e, given.scale, store, workers=given.workers, fresh=given.fresh, changes=changes)
            against = controls(e, given.scale, store, workers=given.workers) if getattr(given, "controls", False) else []
        except RichterError as why:
            if given.command == "run":
                raise
            failed = True
            print(f"{e.name}: FAILED. {why}", file=sys.stderr)
            found.append({"experiment": e.name, "error": str(why)})
            continue
        failed |= c.failed or any(f.holds for f in against)
        found.append({**c.record, "controls": [{**f.record, "control": f.claim.control.text} for f in against]})
        folder = summarise(c, store)
        if not given.json:
            print(_shown(c, against) + f"\n{folder}: {', '.join(f'{k}.svg' for k in e.figures) or 'no figure'}\n")
        if given.record:
            keep(c.record)
    if given.json:
        print(as_json(found))
    return int(failed or all("skipped" in f for f in found))  # what was not checked has not passed


def _needs(e: Experiment) -> str:
    return ", ".join([*e.data, *(f"{name} (paper)" for name in e.more_data)]) or "none needed"


def _lacking(e: Experiment, scale: str) -> str:
    """What has to be fetched before it can run."""
    from richter.tasks import store
    cached = {entry.name for entry in store.available() if entry.cached}
    lacking = [name for name in (*e.data, *(e.more_data if scale == "paper" else ())) if name not in cached]
    return f"it needs `richter data fetch {' '.join(lacking)}`" if lacking else ""


def _shown(c: Checked, against: Iterable[Finding]) -> str:
    from richter.experiments.ledger import shown
    rows = [("claim", "paper", "ours", "bar", "verdict")]
    for f in c.findings:
        rows.append((f.claim.text, f.claim.paper, shown(f.value), str(f.claim.expect), f.verdict))
    for f in against:
        rows.append((f"  control: {f.claim.control.text}", "", shown(f.value), str(f.claim.expect),
                     "HOLDS, and must not" if f.holds else "fails, as it must"))
    head = f"{c.experiment.name}  [{c.experiment.ref}]  {c.experiment.title}"
    tasks = f"{c.record['tasks']} task{'s' * (c.record['tasks'] != 1)}"
    cost = f"{c.scale} scale, {tasks}, {c.record['cpu_minutes']:.2f} CPU-minutes"
    return f"{head}\n{cost}\n{table(rows, right=(2,))}"


def _ledger(given: argparse.Namespace) -> int:
    from richter import experiments
    from richter.experiments.ledger import page, records
    text = page([experiments.get(name) for name in experiments.names()], records())
    if given.output is None:
        print(text, end="")
    else:
        given.output.write_text(text, encoding="utf-8")
        print(given.output)
    return 0


def _cite(given: argparse.Namespace) -> int:
    from richter.core.citations import bibtex, references
    papers = []
    for name in given.name:
        if name not in references():
            from richter import experiments
            from richter.core import unknown
            from richter.measures import catalogue
            known = {**{k: m.ref.paper for k, m in catalogue().items() if m.ref},
                     **{k: k.partition("_")[0] for k in experiments.names()}}  # a file's name begins with its paper
            if name not in known:
                raise unknown("Richter", "paper, experiment or measure", name, [*references(), *known])
            name = known[name]
        papers.append(name)
    print(bibtex(papers))
    return 0
