"""Controls: what makes training lazier or richer.

    groups = richter.controls.slo_groups(model, {"0": 500.0}, default=0.002)
    optimiser = richter.controls.SLO(groups, lr=0.03)       # then as any other torch.optim.Optimizer
    trained = richter.controls.layerwise.train(model, x, y) # one layer after another
"""

from richter.controls import layerwise
from richter.controls.adaptive import AdaptiveSLO
from richter.controls.groups import slo_groups
from richter.controls.slo import SLO

__all__ = ["SLO", "AdaptiveSLO", "layerwise", "slo_groups"]
