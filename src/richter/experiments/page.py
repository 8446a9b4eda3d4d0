"""The ledger as docs/claims.md, made from stored records alone: a matrix for each paper, and one line for each claim."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from richter.core.values import reference
from richter.experiments.ledger import LedgerLine, LedgerPlace, Records, counted, places, state_of
from richter.experiments.outcomes import MEANINGS, OUTCOMES, PROTOCOLS, REASONS, bar_of
from richter.experiments.staleness import ABSOLUTE, RELATIVE, Record

if TYPE_CHECKING:
    from richter.experiments.frame import Experiment

TITLE = "What the papers claim, and what was found"
HEAD = (
    "Made by `make claims` from the records in `src/richter/experiments/records/`; nothing here is written by hand. "
    "`richter ledger --html -o ledger` writes pages with the figures that were drawn on your machine, `richter ledger --json` "
    "the same as data. [What the words mean](experiments.md#what-an-outcome-says); [misprints that were found](errata.md).")
REPLICATIONS = ("In the words of the ACM all of these are replications: other people, their own code. A line is about one claim, "
                "never about a paper. No authors were written to yet.")
STATES = (
    "A record names the modules that its numbers came from: the experiment's file, and what it imports of experiments, tasks, "
    "models, theory, learners and controls. It is **stale** when one of them has changed since (words of the ledger, comments "
    "and layout apart), when the experiment gives other numbers at smoke scale than it did when the record was made (by more "
    f"than {RELATIVE:g} of the number and {ABSOLUTE:g}), or when it was made before records named their modules.")
CELL = 200  # characters in a cell at most


def page(experiments: Iterable[Experiment], stored: Records, paper: str = "") -> str:
    """Return the text of docs/claims.md, or the part of one paper."""
    by_name = {e.name: e for e in experiments}
    rows = places(by_name.values(), stored, paper)
    lines = [f"# {TITLE}", "", HEAD, "", REPLICATIONS, ""]
    lines += [summary(rows), "", *_matrix([line for row in rows for line in row.lines]), "", out_of_date(by_name, stored), ""]
    for name in dict.fromkeys(row.paper for row in rows):
        lines += _paper(name, [row for row in rows if row.paper == name])
    lines += ["## The records", "", STATES, "",
              "| experiment | scale | CPU-minutes | date | revision | state |", "|---|---|---|---|---|---|"]
    lines += [f"| `{r['experiment']}` | {r['scale']} | {r['cpu_minutes']:.2f} | {r['date']} | `{(r['revision'] or 'none')[:10]}` "
              f"| {shortened(_cell(_state(r, by_name.get(r['experiment']), stored)))} |" for r in stored.values()
              if not paper or r["paper"] == paper]
    return "\n".join(lines) + "\n"


def summary(rows: Sequence[LedgerPlace]) -> str:
    """Return how many places and claims there are, in a sentence."""
    claims = [line for row in rows for line in row.lines]
    own = sum(line.own for line in claims)
    return (f"{len(rows)} figures, tables and results; {len(claims) - own} claims of the papers and {own} of our own about them; "
            f"{sum(bool(row.lines) for row in rows)} results have a claim.")


def _matrix(lines: Iterable[LedgerLine]) -> list[str]:
    """Return a table of the papers' claims: outcomes down, protocols across."""
    counts = counted(lines)
    rows = [(word, [counts.get((word, kind), 0) for kind in PROTOCOLS]) for word in OUTCOMES]
    table = [f"| {word} | {' | '.join(str(n or '') for n in row)} | {sum(row)} |" for word, row in rows if sum(row)]
    return [f"| claims | {' | '.join(PROTOCOLS)} | all |", f"|---|{'---|' * (len(PROTOCOLS) + 1)}", *table]


def _paper(name: str, rows: list[LedgerPlace]) -> list[str]:
    """Return the section of a paper: its matrix, its places, its claims one by one, and our own."""
    claims = [(row, line) for row in rows for line in row.lines if not line.own]
    own = [(row, line) for row in rows for line in row.lines if line.own]
    text = [f"## `{name}`: {reference(name)['title']}", ""]
    text += [*_matrix([line for _, line in claims]), ""] if claims else []
    text += ["| place | what it shows | worst outcome | reproduced | weakest protocol |", "|---|---|---|---|---|",
             *(f"| {row.place} | {_cell(row.title)} | {row.outcome or 'claims of our own'} | {row.reproduced} | {row.protocol} |"
               for row in rows), ""]
    if claims:
        text += ["| place | the paper's claim | ours | outcome | protocol | meaning | reason |", "|---|---|---|---|---|---|---|",
                 *(f"| {row.place} | {_cell(line.says)} | {_cell(ours(line))} | {line.outcome} | {protocol_of(line)} "
                   f"| {_cell(meaning_of(line))} | {line.reason} |" for row, line in claims), ""]
    if own:
        text += ["Claims of our own:", "", "| place | claim | ours | verdict | meaning |", "|---|---|---|---|---|",
                 *(f"| {row.place} | {_cell(shortened(line.says))} | {_cell(ours(line))} | {line.outcome} "
                   f"| {_cell(meaning_of(line))} |" for row, line in own), ""]
    return text


def ours(line: LedgerLine) -> str:
    """Return our number with its bar, a mark if its record is stale, and what it is unless the line says so itself."""
    stale = " (stale)" if line.stale else ""
    if not line.record:
        return line.number
    what = "" if line.says == line.measured else f": {line.measured}"
    return shortened(f"{line.number}{stale}, bar {bar_of(line.record)}{what}")


def protocol_of(line: LedgerLine) -> str:
    """Return the protocol with what differs from the paper."""
    return f"{line.protocol}: {line.settings}" if line.settings else line.protocol


def meaning_of(line: LedgerLine) -> str:
    """Return the meaning with at most two rivals."""
    more = f" and {len(line.meaning.rivals) - 2} more" if len(line.meaning.rivals) > 2 else ""
    return shortened(f"{line.meaning._replace(rivals=line.meaning.rivals[:2])}{more}", 120)


def shortened(text: str, length: int = CELL) -> str:
    """Return a text that is at most so long."""
    return text if len(text) <= length else f"{text[:length - 3].rstrip()}..."


def glossary() -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the words of the ledger with their meaning, by axis."""
    return [("outcome", list(OUTCOMES.items())), ("protocol", list(PROTOCOLS.items())), ("meaning", list(MEANINGS.items())),
            ("reason", [(", ".join(REASONS), "why a claim is not simply reproduced")])]


def out_of_date(by_name: Mapping[str, Experiment], stored: Records) -> str:
    """Return how many records of each scale are stale, and what they took."""
    counts = []
    for scale in ("smoke", "paper"):
        states = [state_of(r, by_name[r["experiment"]], stored) for r in stored.values()
                  if r["scale"] == scale and r["experiment"] in by_name]
        counts.append(f"Records at {scale} scale: {len(states)}, stale: {sum(s.stale for s in states)}.")
    return " ".join([*counts, f"CPU-minutes spent on them: {sum(r['cpu_minutes'] for r in stored.values()):.1f}."])


def _state(record: Record, e: Experiment | None, stored: Records) -> str:
    """Return the state of a record for the table of records."""
    if e is None:
        return "its experiment is no more"
    return str(state_of(record, e, stored)).replace("stale", "**stale**", 1)


def _cell(text: str) -> str:
    """Escape a text for a Markdown table; only code may contain a literal <."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))
