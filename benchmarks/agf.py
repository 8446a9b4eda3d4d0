"""What a staircase of ten steps costs: alternating flows against the gradient flow that they predict, integrated with an adaptive
step. Of a linear network in closed form and by the algorithm (against an explicit method of order eight and an implicit one, by
moments in numpy, the cheapest way to follow it), and of linear attention, whose neurons have degree 3, by the algorithm. All take
turns on one thread, and processor time is told: machines are shared."""

from __future__ import annotations

import argparse
import statistics

import numpy as np
import torch
from scipy.integrate import solve_ivp
from slo import Work, turns

from richter.theory import agf, alternating
from richter.theory.arrays import normal

GOAL, STEPS, NEURONS, LOG = 20.0, 10, 12, 16.0
STRENGTHS = 4 * 1.6 ** -np.arange(STEPS)


def linear() -> dict[str, Work]:
    """A linear network of ten modes, each 1.6 times weaker than the one before, from weights of size exp(-16)."""
    draw = np.random.default_rng(0)
    x = np.linalg.qr(draw.standard_normal((40, STEPS)))[0] * np.sqrt(40)
    y = x * STRENGTHS
    theta = np.exp(-LOG) * draw.standard_normal((NEURONS, 2 * STEPS)) / np.sqrt(2 * STEPS)
    neuron, given = alternating.layers("linear", theta, x, y)
    end = 1.1 * LOG / STRENGTHS[-1]
    C = np.diag(STRENGTHS)

    def closed() -> None:
        assert len(agf.linear(np.eye(STEPS), C).times) == STEPS

    def algorithm() -> None:
        learned = agf.alternating_flows(neuron, *given, tolerance=1e-9)
        assert (learned.staircase.levels[-1] < 1e-6 * learned.staircase.levels[0]), learned

    def velocity(_: float, flat: np.ndarray) -> np.ndarray:  # by moments: cheaper than by examples
        W, A = np.split(flat.reshape(NEURONS, -1), 2, axis=1)
        pull = C - A.T @ W
        return np.concatenate([A @ pull, W @ pull.T], 1).reshape(-1)

    def flow(method: str) -> None:
        done = solve_ivp(velocity, (0, end), theta.reshape(-1), method=method, rtol=1e-6, atol=1e-12, t_eval=[end])
        W, A = np.split(done.y[:, -1].reshape(NEURONS, -1), 2, axis=1)
        assert np.linalg.norm(A.T @ W - C) < 1e-2

    return {"closed form": closed, "algorithm": algorithm, "gradient flow, explicit": lambda: flow("DOP853"),
            "gradient flow, implicit": lambda: flow("LSODA")}


def attention() -> dict[str, Work]:
    """Ten components with eigenvalues ~ 1/i of sum 2, 32 examples in a context, 14 heads with entries of size 1e-3."""
    lam = 1 / np.arange(1, STEPS + 1)
    lam, N, heads, alpha = torch.from_numpy(2 * lam / lam.sum()), 32, 14, 1e-3
    E = N * (N + 1) * lam**2 + N * lam.sum() * lam
    shapes = ((heads,), (heads, STEPS), (heads, STEPS))
    v, k, q = (alpha * normal(*shape, seed=i) for i, shape in enumerate(shapes))  # as attention_flow draws them
    theta, target = torch.cat([v[:, None], k, q], 1), torch.diag(N * lam**1.5 / E.sqrt()).reshape(1, -1)

    def head(own: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        key, query = E.sqrt() * own[1:1 + STEPS], lam.sqrt() * own[1 + STEPS:]
        return (own[0] * key[:, None] * query).reshape(1, -1)

    def algorithm() -> agf.Learned:
        learned = agf.alternating_flows(head, theta, torch.ones(1, 1, dtype=torch.float64), target, tolerance=1e-5)
        assert len(learned.order) >= STEPS
        return learned

    end = float(algorithm().staircase.times[-1]) * alpha * N * float(lam.max()) ** 2

    def flow() -> None:
        _, losses, _ = agf.attention_flow(lam, N, heads, alpha, [0.0, 1.1 * end])
        assert abs(float(losses[-1]) / float(agf.attention(lam, N).levels[-1]) - 1) < 1e-2

    return {"algorithm": algorithm, "gradient flow": flow}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for words, cases in (("linear network", linear()), ("linear attention", attention())):
        times = turns(cases, given.rounds)
        flows = [name for name in times if name.startswith("gradient flow")]
        fastest = min(flows, key=lambda name: statistics.median(times[name]))
        for name, rows in times.items():
            ratio = statistics.median(b / a for a, b in zip(rows, times[fastest], strict=True))
            goal = "" if name in flows else f"{GOAL:g} {'met' if ratio >= GOAL else 'MISSED'}"
            print(f"{words:<18} {name:<26} {1e3 * statistics.median(rows):>10.2f} ms {ratio:>9.2f} times cheaper {goal}",
                  flush=True)


if __name__ == "__main__":
    main()
