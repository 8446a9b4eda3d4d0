"""Kernels of networks: ``ntk``, ``ptk``, ``infinite`` (closed forms), ``dynamics`` (training under a frozen kernel, and how
kernels evolve) and what is computed from any kernel matrix."""

from __future__ import annotations

from richter.kernels import dynamics, infinite
from richter.kernels.ntk import backward_kernel, forward_kernel, ntk, plan, ptk, ptk_covariance
from richter.linalg import alignment, cka, power_law, specialisation, stable_rank

__all__ = ["alignment", "backward_kernel", "cka", "dynamics", "forward_kernel", "infinite", "ntk", "plan", "power_law", "ptk",
           "ptk_covariance", "specialisation", "stable_rank"]
