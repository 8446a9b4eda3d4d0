"""What counting pairs of words costs: against hyperhyper, the fastest library found that counts weighted windows, on one text, as
ratios of processor time; and its time and memory by the number of tokens and the size of the vocabulary. The text is drawn: words
by Zipf's law, independent of each other, which is the worst case for memory, because nearly every pair is another one.

    python benchmarks/words.py                              # the ratio, on 2 million tokens (--text FILE: of a text of yours)
    python benchmarks/words.py --tokens 1e8 --vocabulary 100000        # one size, with its peak memory
    python benchmarks/words.py --grow growth.png            # a figure: 1e5 to 1e7 tokens, vocabularies of 1e3 to 1e5
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from richter.tasks.cooccurrence import count

GOAL, LIMIT = 2.0, 8.0  # of the peer's time; GiB for 100 million tokens
WINDOW = 16
LINE = 1_000  # words of a line


def draw(path: Path, tokens: int, vocabulary: int, seed: int = 0) -> None:
    """Write a text of words w0, w1, ... whose frequencies fall like 1 / rank."""
    rng = np.random.default_rng(seed)
    ends = np.cumsum(1 / np.arange(1, vocabulary + 1))
    names = np.array([f"w{i}" for i in range(vocabulary)], dtype=object)
    with path.open("w") as out:
        for start in range(0, tokens, 1_000_000):
            size = min(1_000_000, tokens - start)
            words = names[np.searchsorted(ends, rng.random(size) * ends[-1])]
            for i in range(0, size, LINE):
                out.write(" ".join(words[i:i + LINE]) + "\n")


def spent() -> float:
    """Processor seconds of this process and of those that it started."""
    return sum(usage.ru_utime + usage.ru_stime for usage in map(resource.getrusage, (resource.RUSAGE_SELF,
                                                                                      resource.RUSAGE_CHILDREN)))


def peer(path: Path, vocabulary: int, folder: str) -> float:
    """Processor seconds of hyperhyper, from the file to the matrix: its own vocabulary, its own files."""
    import hyperhyper
    from hyperhyper.pair_counts import count_pairs
    before = spent()
    corpus = hyperhyper.Corpus.from_sents(path.read_text().splitlines(), keep_n=vocabulary)
    corpus.texts_to_file(folder, 100)
    count_pairs(corpus, window=WINDOW, dynamic_window="deter", subsample="off")
    return spent() - before


def compare(path: Path, vocabulary: int, rounds: int) -> None:
    """Print both times and their ratio; rounds take turns."""
    own, other = [], []
    for _ in range(rounds):
        before = spent()
        count(path, vocabulary=vocabulary, window=WINDOW, lines=True)
        own.append(spent() - before)
        with tempfile.TemporaryDirectory() as folder:
            other.append(peer(path, vocabulary, folder))
    ratio = float(np.median(np.divide(own, other)))
    print(f"counting {path.stat().st_size / 1e6:.0f} MB, vocabulary {vocabulary:,}, window {WINDOW}: {np.median(own):.2f} s, "
          f"hyperhyper {np.median(other):.2f} s, ratio {ratio:.2f} (goal {GOAL:g}: {'met' if ratio <= GOAL else 'MISSED'})")


def once(tokens: int, vocabulary: int, workers: int) -> dict[str, float]:
    """Seconds, processor seconds and peak memory of one count in a process of its own."""
    code = ("import json, resource, sys, time\nfrom richter.tasks.cooccurrence import count\n"
            "if __name__ == '__main__':\n"
            "    begun = time.time()\n"
            f"    counts = count(sys.argv[1], vocabulary={vocabulary}, window={WINDOW}, workers={workers})\n"
            "    own, below = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))\n"
            "    print(json.dumps({'wall': time.time() - begun, 'cpu': own.ru_utime + own.ru_stime + below.ru_utime + "
            "below.ru_stime, 'GiB': own.ru_maxrss / 2**20, 'worker GiB': below.ru_maxrss / 2**20, 'pairs': counts.pairs.nnz}))\n")
    with tempfile.TemporaryDirectory() as folder:
        text, script = Path(folder) / "text.txt", Path(folder) / "work.py"
        draw(text, tokens, vocabulary)
        script.write_text(code)
        done = subprocess.run([sys.executable, script, text], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def grow(path: Path) -> None:
    """Draw time and memory by tokens, for three vocabularies."""
    import matplotlib
    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(7.4, 3), layout="constrained")
    sizes = [100_000, 1_000_000, 10_000_000]
    for vocabulary in (1_000, 10_000, 100_000):
        seen = [once(tokens, vocabulary, 1) for tokens in sizes]
        for ax, name, title in zip(axes, ("cpu", "GiB"), ("processor seconds", "peak memory [GiB]"), strict=True):
            ax.loglog(sizes, [s[name] for s in seen], "o-", label=f"{vocabulary:,} words")
            ax.set(xlabel="tokens", ylabel=title)
            ax.grid(alpha=0.5)
        print(vocabulary, seen)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=float)
    parser.add_argument("--vocabulary", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--grow", type=Path)
    args = parser.parse_args()
    if args.grow:
        grow(args.grow)
    elif args.tokens:
        begun = time.time()
        seen = once(int(args.tokens), args.vocabulary, args.workers)
        peak = seen["GiB"] + (args.workers > 1) * args.workers * seen["worker GiB"]
        print(f"{args.tokens:.3g} tokens, vocabulary {args.vocabulary:,}, {args.workers} workers: {seen['wall']:.0f} s "
              f"({seen['cpu']:.0f} CPU-s), {seen['pairs']:,} pairs, at most {peak:.2f} GiB (limit for 1e8 tokens {LIMIT:g}); "
              f"{time.time() - begun:.0f} s with the text")
    else:
        with tempfile.TemporaryDirectory() as folder:
            text = args.text or Path(folder) / "text.txt"
            if args.text is None:
                draw(text, 2_000_000, 30_000)
            compare(text, args.vocabulary, args.rounds)


if __name__ == "__main__":
    main()
