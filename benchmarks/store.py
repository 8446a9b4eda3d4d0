"""What it costs to keep a million numbers and to read one curve back, against TensorBoard in the same run: 1,000 steps of 20
layers with 50 measures each, one write call for each step; then one measure of one layer, several times, from a fresh start.
Times are of cores, of all threads together: what else the machine does is not in them."""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from richter import runs
from richter.core import Row

LAYERS, MEASURES = [f"layers.{i}" for i in range(20)], [f"measure_{j}" for j in range(50)]


def value(step: int, i: int, j: int) -> float:
    return step / (1 + i) + j / 64


def seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def write_run(folder: Path, steps: int) -> None:
    with runs.create(folder) as run:
        for step in range(steps):
            run.rows([Row(step, layer, measure, value(step, i, j)) for i, layer in enumerate(LAYERS)
                      for j, measure in enumerate(MEASURES)])


def read_run(folder: Path) -> np.ndarray:
    run = runs.load(folder)
    try:
        return run.series(MEASURES[7], LAYERS[3]).value
    finally:
        run.close()


def write_tensorboard(folder: Path, steps: int) -> None:
    from torch.utils.tensorboard import SummaryWriter
    with SummaryWriter(str(folder)) as board:
        for step in range(steps):
            for i, layer in enumerate(LAYERS):
                for j, measure in enumerate(MEASURES):
                    board.add_scalar(f"{layer}/{measure}", value(step, i, j), step)  # safe within two minutes; a row is at once


def read_tensorboard(folder: Path) -> np.ndarray:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return np.array([e.value for e in events.Scalars(f"{LAYERS[3]}/{MEASURES[7]}")])


def size(folder: Path) -> float:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5, help="of reading; TensorBoard's takes long and gets at most three")
    arguments = parser.parse_args()
    expected = np.array([value(step, 3, 7) for step in range(arguments.steps)])
    with tempfile.TemporaryDirectory() as place:
        ours, theirs = Path(place) / "run", Path(place) / "board"
        written = seconds(lambda: write_run(ours, arguments.steps))
        read = [seconds(lambda: read_run(ours)) for _ in range(arguments.repeats)]
        assert np.array_equal(read_run(ours), expected)
        rows = arguments.steps * len(LAYERS) * len(MEASURES)
        print(f"a run: {rows:,} rows written in {written:.1f} s ({rows / written:,.0f} a second), {size(ours):.0f} MB; "
              f"one curve of {arguments.steps:,} read in {1e3 * statistics.median(read):.1f} ms ({1e3 * min(read):.1f} to "
              f"{1e3 * max(read):.1f} ms in {len(read)} repeats)", flush=True)
        try:
            import torch.utils.tensorboard  # noqa: F401  # now: what an import takes is no part of writing
        except ImportError:
            print("TensorBoard is not installed (pip install tensorboard): nothing to compare with")
            return
        board_written = seconds(lambda: write_tensorboard(theirs, arguments.steps))
        board_read = [seconds(lambda: read_tensorboard(theirs)) for _ in range(min(arguments.repeats, 3))]
        assert np.allclose(read_tensorboard(theirs), expected)
        print(f"TensorBoard: written in {board_written:.1f} s ({rows / board_written:,.0f} a second), {size(theirs):.0f} MB; "
              f"the same curve read in {statistics.median(board_read):.1f} s ({min(board_read):.1f} to {max(board_read):.1f} s "
              f"in {len(board_read)} repeats)")
        print(f"a run is {board_written / written:.1f} times as fast to write and "
              f"{statistics.median(board_read) / statistics.median(read):,.0f} times as fast to read")


if __name__ == "__main__":
    main()
