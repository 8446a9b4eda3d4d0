"""What a dashboard costs with many runs: the first list, a poll after it, and memory over many requests; the server runs in a
process of its own, the runs are copies of one."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from richter import runs
from richter.core import Row


def make(store: Path, number: int) -> None:
    with runs.create(store / "run0", {"lr": 0.1}) as run:
        for step in range(20):
            run.rows([Row(step, layer, "nfc", step / 20) for layer in ("0", "2", "4")])
            run.scalars(step, loss=1 / (1 + step))
    for i in range(1, number):
        shutil.copytree(store / "run0", store / f"run{i}")


def asked(address: str) -> tuple[float, int, int]:
    """Seconds, lines, and how many of them have been read."""
    begun = time.perf_counter()
    with urllib.request.urlopen(f"{address}api/runs", timeout=600) as reply:
        lines = json.load(reply)["runs"]
    return time.perf_counter() - begun, len(lines), sum(line["status"] != "not read yet" for line in lines)


def resident(pid: int) -> float:
    """MiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1024 if found else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--requests", type=int, default=20_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), given.runs)
        code = f"from richter.report.server import serve; serve({folder!r}, port=0)"
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            seconds, lines, read = asked(found[0])
            print(f"first list of {lines:,} runs: {seconds:.2f} s, {read:,} of them read by then", flush=True)
            polls, begun = [], time.perf_counter()
            while read < lines:
                seconds, _, read = asked(found[0])
                polls.append(seconds)
                time.sleep(1)
            passed = time.perf_counter() - begun
            print(f"all read after {passed:.0f} s; polls meanwhile: at most {max(polls, default=0):.2f} s", flush=True)
            polls = [asked(found[0])[0] for _ in range(20)]
            print(f"polls then: {sorted(polls)[10]:.2f} s, at most {max(polls):.2f} s", flush=True)
            before = resident(server.pid)
            for i in range(given.requests):
                urllib.request.urlopen(f"{found[0]}api/run?run=run{i % given.runs}", timeout=60).read()
                if (i + 1) % max(1, given.requests // 4) == 0:
                    print(f"after {i + 1:,} requests: {resident(server.pid):.0f} MiB (before them {before:.0f})", flush=True)
        finally:
            server.terminate()
            server.wait(10)


if __name__ == "__main__":
    main()
