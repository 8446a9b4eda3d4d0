"""Say what word embeddings learn from your text, and in which order: concepts, their words and predicted times.

Files are texts in UTF-8. The folder given by --out keeps the counts (an interrupted count is resumed), vectors.txt in word2vec's
text format, and words.svg and words.pdf with the spectrum and the growth of each concept."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from richter.commands import options
from richter.commands.frame import Command, as_json


def arguments(p: argparse.ArgumentParser) -> None:
    p.add_argument("files", type=Path, nargs="+", metavar="FILE", help="text files")
    p.add_argument("-o", "--out", type=Path, default=Path("words"), help="folder of everything that is kept (default: words)")
    p.add_argument("--lines", action="store_true", help="each line is a text of its own: no pair crosses the end of a line")
    p.add_argument("--vocabulary", type=int, default=10_000, help="so many of the most frequent words (default: 10000)")
    p.add_argument("--least", type=int, default=5, help="words that occur at least so many times (default: 5)")
    p.add_argument("--window", type=int, default=16, help="largest distance of a pair of words (default: 16)")
    p.add_argument("--dimensions", type=int, default=100, help="dimensions of the embeddings (default: 100)")
    p.add_argument("--scale", type=float, default=1e-4, help="size of the initial embeddings (default: 0.0001)")
    p.add_argument("--concepts", type=int, default=20, help="concepts to print (default: 20)")
    p.add_argument("--follow", nargs="+", default=[], metavar="WORD", help="also say when the meaning of these words is resolved")
    p.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes that count (default: all cores)")
    options.machine(p)


def do(args: argparse.Namespace) -> int:
    from richter.report.figures import save
    from richter.workflows import words
    seen = words(args.files, dimensions=args.dimensions, scale=args.scale, vocabulary=args.vocabulary, window=args.window,
                 least=args.least, lines=args.lines, folder=args.out / "counts", workers=args.workers)
    followed = [seen.follow(word) for word in args.follow]
    if args.json:
        print(as_json(seen.to_json()))
    else:
        print("\n\n".join([seen.shown(args.concepts), *map(str, followed)]))
    seen.save(args.out / "vectors.txt")
    save(seen.plot(), args.out / "words")
    if not args.json:
        print(f"\nVectors: {args.out / 'vectors.txt'}; figure: {args.out / 'words.svg'}")
    return 0


COMMAND = Command("words", __doc__, do, arguments, group="data", place=45, examples=(
    "richter words reviews.txt --lines", "richter words book1.txt book2.txt --vocabulary 5000 --follow king water",
    "richter words corpus.txt --dimensions 200 -o words/corpus --json"))
