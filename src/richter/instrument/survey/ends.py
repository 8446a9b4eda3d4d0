"""The two ends of a model: the maps that read its input, and those whose output is its own."""

from __future__ import annotations

from typing import Any

from torch.autograd.function import BackwardCFunction

from richter.instrument.capture import Pass

# names of operations, as autograd has them, that only move, add up or scale numbers
LINEAR = ("Add", "Alias", "AsStrided", "Cat", "Clone", "Div", "Expand", "Gather", "Index", "Mean", "Mul", "Neg", "Permute",
          "Reshape", "Select", "Slice", "Split", "Squeeze", "Stack", "Sub", "Sum", "T", "ToCopy", "Transpose", "Unbind",
          "UnsafeView", "Unsqueeze", "View")
SUMS = ("Add", "Sub", "Cat", "Stack")


def given(run: Pass) -> frozenset[str]:
    """Maps none of whose calls read anything that depends on weights."""
    return frozenset(c.name for c in run.calls) - {c.name for c in run.calls if not c.given}


def readouts(run: Pass) -> frozenset[str]:
    """The maps that are met first on the way back from the outputs: through what only moves numbers, through sums of several
    branches, and through functions of one tensor (a softmax, a mean over positions) where nothing has been added yet."""
    maps: dict[Any, set[str]] = {}
    for c in run.calls:
        maps.setdefault(c.edge.node, set()).add(c.name)
    met: set[str] = set()
    seen, todo = set(), [(run.f.grad_fn, False)]
    while todo:
        node, branched = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in maps:
            met |= maps[node]
            continue
        if isinstance(node, BackwardCFunction):  # a function of a user's own: what happens inside is not seen
            continue
        befores = [before for before, _ in node.next_functions if before is not None]
        branches = [before for before in befores if not hasattr(before, "variable")]  # without weights
        kind = node.name().rpartition("Backward")[0]
        if len(branches) < len(befores) and kind not in LINEAR:  # a product with a weight that is no map
            continue
        if len(branches) == 1 and (kind in LINEAR or not branched):
            todo.append((branches[0], branched))
        elif kind in SUMS:
            todo += [(before, True) for before in branches]
    return frozenset(met)
