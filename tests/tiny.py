"""A small experiment without torch, for the tests of the frame: a walk whose sum is known."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from richter.core import Interval, Ref, Row
from richter.experiments import keys
from richter.experiments.frame import Claim, Control, Experiment, Results, Task
from richter.experiments.running import check
from richter.runs import Writer


@dataclass(frozen=True)
class Settings:
    steps: int = 30
    seeds: tuple[int, ...] = (0, 1, 2)
    pause: float = 0.0
    wrong: bool = False
    broken: int = -1  # the seed that raises


def work(task: Task[Settings], run: Writer) -> dict[str, Any]:
    s = task.settings
    with open(os.environ.get("TINY_LOG", os.devnull), "a") as log:
        log.write(f"{task.seed}\n")
    if task.seed == s.broken:
        raise ValueError(f"seed {task.seed} is broken")
    total = 0.0
    for step in range(s.steps):
        total += step * (task.seed + 1)
        run.rows([Row(step, "a", "sum", total)])
        run.progress(step / s.steps)
        time.sleep(s.pause)
    return {"total": total + s.wrong, "curve": run.run.series("sum", "a").value}


def killed(task: Task[Settings], run: Writer) -> dict[str, Any]:
    """The process of the second seed ends, until it may go on."""
    if task.seed == 1 and not (run.path.parent.parent / "again").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return work(task, run)


def expected(r: Results) -> float:
    """Largest difference from n (n - 1) / 2 times seed + 1."""
    n = r.settings.steps
    return float(max(abs(found["total"] - n * (n - 1) / 2 * (t.seed + 1)) for t, found in r))


def draw(r: Results) -> Any:
    from richter.report.drawing import band, caption, label, panels
    figure, (ax,) = panels(1, across=1)
    band(ax, np.arange(r.settings.steps), r["curve"])
    label(ax, "step", "sum")
    caption(figure, "Sums grow.")
    return figure


EXPERIMENT = Experiment(
    name="nfa_tiny", ref=Ref("nfa", "Fig. 99"), title="sums of whole numbers", smoke=Settings(), paper=Settings(steps=60),
    over=("seed",), work=work, figures={"sums": draw}, start={"steps": 1}, protocol="exact",
    claims=(Claim("distance to the closed form", expected, Interval(high=1e-9), Control("a wrong sum", {"wrong": True}),
                  paper="0", source="arithmetic", says="The sum of the first n numbers is n (n - 1) / 2."),
            Claim("growth of the curve", lambda r: float(np.diff(r["curve"]).min()), Interval(low=0.0),
                  Control("a falling walk", {"seeds": (-3,)}),
                  source="arithmetic", own=True)))


def die_after(writes: int, seconds: float) -> None:
    """Kill this process so many seconds after so many writes: it always comes to that, however slow the machine is."""
    left, write = [writes], Writer.rows

    def counted(run: Writer, rows: Any) -> None:
        write(run, rows)
        left[0] -= 1
        if not left[0]:
            threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGKILL]).start()  # the process does not end before

    Writer.rows = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    keys.rest = lambda: "unchanged"  # a digest of the whole library takes seconds
    store, changes = sys.argv[1], json.loads(sys.argv[2])
    if len(sys.argv) > 3:
        die_after(int(sys.argv[3]), float(sys.argv[4]))
    found = check(EXPERIMENT, "smoke", store, changes=changes)
    print(json.dumps([f.value for f in found.findings]))
    assert "torch" not in sys.modules
