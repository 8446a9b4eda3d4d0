"""Recurrent layers (``nn.LSTM``, ``nn.GRU``, ``nn.RNN`` and their cells) pass their weights to one function. This call is split
into the input map and the hidden map of each gate:

    lstm.ih_l0.i   from the input to gate i of layer 0             lstm.hh_l0_reverse.f   from the state, backward direction
    lstm.hr_l1     the projection of the state (proj_size)          cell.ih.n              of a cell, without a layer number

Gates are i, f, g, o for an LSTM and r, z, n for a GRU; an RNN has one gate without a name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from richter.layers import LinearMap, View, takes_apart
from richter.layers.linear import positions

State = tuple[Tensor, ...]  # (h,), or (h, c) for an LSTM
Remember = Callable[[str, View, Tensor, Tensor, Tensor], None]  # (name of a weight, its maps, input, weight, z)


def gates(names: Sequence[str]) -> View:
    """Return the maps of one weight, whose rows are one block per gate, of equal size."""
    def gate(i: int) -> LinearMap:
        return LinearMap(matrix=lambda m, w: w.chunk(len(names), dim=0)[i], inputs=lambda m, x: positions(x),
                         outputs=lambda m, z: positions(z).chunk(len(names), dim=-1)[i])
    return {name: gate(i) for i, name in enumerate(names)}


def lstm(x: Tensor, y: Tensor, h: Tensor, c: Tensor) -> State:
    """Compute one step from the outputs of the input map (x) and of the hidden map (y) of all gates."""
    i, f, g, o = (x + y).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru(x: Tensor, y: Tensor, h: Tensor) -> State:
    """Next state of a GRU from the products of input and state."""
    (r, z, n), (r_h, z_h, n_h) = x.chunk(3, -1), y.chunk(3, -1)
    n, z = torch.tanh(n + (r + r_h).sigmoid() * n_h), (z + z_h).sigmoid()
    return (n + z * (h - n),)


@dataclass(frozen=True)
class RecurrentCell:
    """The computation of one step of a recurrent layer."""

    maps: View  # maps of its input weight and of its hidden weight
    step: Callable[..., State]


LSTM, GRU = RecurrentCell(gates("ifgo"), lstm), RecurrentCell(gates("rzn"), gru)
TANH = RecurrentCell(gates([""]), lambda x, y, h: ((x + y).tanh(),))
RELU = RecurrentCell(gates([""]), lambda x, y, h: ((x + y).relu(),))
PROJECTION = gates([""])
LAYERS = {torch.lstm: LSTM, torch.gru: GRU, torch.rnn_tanh: TANH, torch.rnn_relu: RELU}
CELLS = {torch.lstm_cell: LSTM, torch.gru_cell: GRU, torch.rnn_tanh_cell: TANH, torch.rnn_relu_cell: RELU}


def weights_of(func: Any, args: Sequence[Any], kwargs: Any) -> dict[str, Tensor]:
    """Return the matrices of a call of a recurrent function: {"ih_l0": ..., "hh_l0_reverse": ...}; empty for any other
    function."""
    if kwargs or (func not in LAYERS and func not in CELLS):
        return {}
    if func in CELLS:
        return dict(zip(("ih", "hh"), args[2:4], strict=True))
    flat, biased, layers, _, _, both = args[2 + _packed(args):][:6]
    sides = [f"l{i}{side}" for i in range(layers) for side in ("", "_reverse")[:1 + both]]
    each = len(flat) // len(sides)
    return {f"{which}_{side}": flat[each * k + j] for k, side in enumerate(sides)
            for which, j in zip(("ih", "hh", "hr"), (0, 1, 4 if biased else 2), strict=True) if j < each}


def recurrent_in_parts(remember: Remember, func: Any, args: Sequence[Any]) -> Any:
    """Compute ``func(*args)``, and pass every matrix product to ``remember``."""
    weights = weights_of(func, args, {})
    if func in LAYERS:
        return _layers_in_parts(_Parts(remember, LAYERS[func], weights, _packed(args)), func, args)
    x, initial, biases = args[0], args[1], (*args[4:], None, None)[:2]
    state = tuple(initial) if func is torch.lstm_cell else (initial,)
    _, state = _Parts(remember, CELLS[func], weights).along(x[None], state, "", biases)
    return state if func is torch.lstm_cell else state[0]


@takes_apart(*LAYERS, *CELLS)
def step(recorder: Any, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Replace the call of a recurrent layer or cell, if all its matrices are known to be weights."""
    weights = weights_of(func, args, kwargs) if torch.is_grad_enabled() else {}
    if weights and all(recorder.owner(f"weight_{which}", weight) for which, weight in weights.items()):
        return recurrent_in_parts(recorder.gated, func, args)
    return recorder.called(func, args, kwargs)


def _layers_in_parts(parts: _Parts, func: Any, args: Sequence[Any]) -> tuple[Tensor, ...]:
    """Compute all layers, in one or in both directions."""
    x, initial, (flat, biased, layers, dropout, train, both) = args[0], args[1 + parts.packed], args[2 + parts.packed:][:6]
    start = tuple(initial) if func is torch.lstm else (initial,)
    time = 1 if not parts.packed and args[8] else 0  # batch_first
    steps: Sequence[Tensor] = x.split(args[1].tolist()) if parts.packed else x.unbind(time)
    each = len(flat) // (layers * (1 + both))
    ends: list[State] = []
    for i in range(layers):
        sides = []
        for side in ("", "_reverse")[:1 + both]:
            k = len(ends)
            biases = flat[each * k + 2:each * k + 4] if biased else (None, None)
            written, end = parts.along(steps, tuple(s[k] for s in start), f"_l{i}{side}", biases, reverse=side != "")
            sides.append(written)
            ends.append(end)
        steps = [torch.cat(pair, -1) for pair in zip(*sides, strict=True)] if both else sides[0]
        if train and dropout and i + 1 < layers:  # one draw for all steps, as in torch
            steps = F.dropout(torch.cat(list(steps)), dropout).split([len(s) for s in steps])
    z = torch.cat(list(steps)) if parts.packed else torch.stack(list(steps), time)
    return z, *(torch.stack(s) for s in zip(*ends, strict=True))


def _packed(args: Sequence[Any]) -> bool:
    """Whether this is a call on a PackedSequence, whose second argument gives the number of sequences at each step."""
    return isinstance(args[1], Tensor) and not args[1].is_floating_point()


@dataclass(frozen=True)
class _Parts:
    """The matrix products of a call, one weight after the other."""

    remember: Remember
    cell: RecurrentCell
    weights: dict[str, Tensor]
    packed: bool = False  # whether the rows of all steps are concatenated (a PackedSequence)

    def along(self, xs: Sequence[Tensor] | Tensor, start: State, side: str, biases: Sequence[Tensor | None],
              reverse: bool = False) -> tuple[list[Tensor], State]:
        """Compute one layer in one direction: its output at each step, and its last state. ``xs`` has one row per active sequence
        at each step; each sequence starts from its row of ``start``."""
        rows = [len(x) for x in xs]
        weights = {which: self.weights[which + side] for which in ("ih", "hh", "hr") if which + side in self.weights}
        read: dict[str, Any] = {"ih": xs if isinstance(xs, Tensor) else self._joined(xs)} | {
            which: [None] * len(rows) for which in ("hh", "hr")}
        z = F.linear(read["ih"], weights["ih"], biases[0])
        wrote = {which: (z.clone() if z._is_view() else z) if which == "ih" else _nothing(z, len(weight))
                 for which, weight in weights.items()}
        at = {which: self._steps(z, rows) for which, z in wrote.items()}
        written: list[Any] = [None] * len(rows)
        state, ended = tuple(s[:rows[-1 if reverse else 0]] for s in start), []
        for t in reversed(range(len(rows))) if reverse else range(len(rows)):
            if rows[t] < len(state[0]):  # some sequences have ended
                ended.append(tuple(s[rows[t]:] for s in state))
                state = tuple(s[:rows[t]] for s in state)
            elif rows[t] > len(state[0]):  # some sequences begin, in the backward direction
                state = tuple(torch.cat([s, s0[len(s):rows[t]]]) for s, s0 in zip(state, start, strict=True))
            read["hh"][t] = state[0].detach()
            state = self.cell.step(at["ih"][t], F.linear(state[0], weights["hh"], biases[1]) + at["hh"][t], *state)
            if "hr" in weights:
                read["hr"][t] = state[0].detach()
                state = (F.linear(state[0], weights["hr"]) + at["hr"][t], *state[1:])
            written[t] = state[0]
        for which, weight in weights.items():
            maps, h = PROJECTION if which == "hr" else self.cell.maps, read[which]
            self.remember(which + side, maps, h if isinstance(h, Tensor) else self._joined(h), weight, wrote[which])
        return written, tuple(torch.cat([s, *rest]) for s, *rest in zip(state, *reversed(ended), strict=True))

    def _joined(self, steps: Sequence[Tensor]) -> Tensor:
        """Stack steps to [steps, n, d], or to [1, 1, rows, d] for a PackedSequence: the first axes do not separate its examples,
        so they are read one at a time."""
        return torch.cat(list(steps))[None, None] if self.packed else torch.stack(list(steps))

    def _steps(self, z: Tensor, rows: list[int]) -> Sequence[Tensor]:
        """Split a result of ``_joined`` into steps."""
        return z[0, 0].split(rows) if self.packed else z.unbind()


def _nothing(z: Tensor, width: int) -> Tensor:
    """Return zeros that are added to the output of a map at every step; their gradient is its backward signal, for all steps at
    once."""
    return z.new_zeros(*z.shape[:-1], width).requires_grad_().clone()
