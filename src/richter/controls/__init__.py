"""Controls of training that make it lazier or richer.

    groups = richter.controls.slo_groups(model, {"0": 500.0}, default=0.002)
    optimiser = richter.controls.SLO(groups, lr=0.03)       # then use it like any other torch.optim.Optimizer
    trained = richter.controls.layerwise.train(model, x, y) # one layer after another
    lazy = richter.controls.Scales(target=0.01, zero=True) # scales of weights, targets, inputs and outputs
"""

from richter.controls import layerwise, richness
from richter.controls.adaptive import AdaptiveSLO
from richter.controls.groups import slo_groups
from richter.controls.richness import Scales
from richter.controls.slo import SLO

__all__ = ["SLO", "AdaptiveSLO", "Scales", "layerwise", "richness", "slo_groups"]
