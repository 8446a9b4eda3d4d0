"""What a step of zoom costs in a panel of several hundred curves, in a real Chromium (with chromedriver and selenium): time until
it is drawn, and of that what the page's own thread worked."""

from __future__ import annotations

import argparse
import math
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from richter import runs
from richter.core import Row

PLOT = "document.querySelector('[data-panel=nfc] .plot')"
STEP = """
const [key, done] = arguments, plot = document.querySelector('[data-panel=nfc] .plot');
const range = () => plot.layout.xaxis.range.join();
const [before, begun] = [range(), performance.now()];
const look = () => range() === before ? requestAnimationFrame(look)
  : requestAnimationFrame(() => setTimeout(() => done(performance.now() - begun)));
plot.closest('.panel').dispatchEvent(new KeyboardEvent('keydown', { key }));
look();
"""


def make(store: Path, number: int, steps: int) -> None:
    for i in range(number):
        with runs.create(store / f"run{i}") as run:
            run.rows([Row(step, layer, "nfc", math.sin(step / 40 + i / 9 + j) + 0.1 * math.sin(7.0 * step * (i + 1)))
                      for step in range(steps) for j, layer in enumerate(("0", "2", "4"))])


def browser() -> Any:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service
    options = webdriver.ChromeOptions()
    options.binary_location = str(shutil.which("chromium") or shutil.which("google-chrome"))
    for word in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,800"):
        options.add_argument(word)
    return webdriver.Chrome(options=options, service=Service(str(shutil.which("chromedriver"))))


def worked(driver: Any) -> float:
    """Seconds of the page's thread."""
    metrics = driver.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
    return next(float(m["value"]) for m in metrics if m["name"] == "TaskDuration")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--curves", type=int, default=450)
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), given.curves // 3, given.steps)
        code = f"from richter.report.server import serve; serve({folder!r}, port=0)"
        server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        driver = browser()
        try:
            assert server.stdout is not None
            found = re.search(r"http://\S+", server.stdout.readline())
            assert found is not None
            driver.get(f"{found[0]}#" + "&".join(f"run=run{i}" for i in range(given.curves // 3)))
            while not driver.execute_script(f"return {PLOT}?.data?.length"):
                time.sleep(0.2)
            time.sleep(5)  # the list has been read by then
            driver.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
            sizes = driver.execute_script(f"return {PLOT}.data.map(trace => trace.x.length)")
            driver.execute_async_script(STEP, "+")
            before, passed = worked(driver), []
            for i in range(20):
                passed.append(driver.execute_async_script(STEP, ("ArrowLeft", "ArrowRight", "+", "-")[i % 4]) / 1e3)
            work = (worked(driver) - before) / len(passed)
            print(f"{given.curves} curves in {len(sizes)} traces of {sum(sizes):,} points: a step takes "
                  f"{statistics.median(passed):.2f} s ({min(passed):.2f} to {max(passed):.2f}), of which the page works "
                  f"{work:.2f} s")
        finally:
            driver.quit()
            server.terminate()
            server.wait(10)


if __name__ == "__main__":
    main()
