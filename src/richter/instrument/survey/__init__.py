"""Before a number leaves: which linear maps there are, which axis of each holds the examples, do examples mix, and do the
captured ``h`` and ``g`` rebuild autograd's gradients? A survey runs a few examples several times and answers by looking, not by
trust.

``maps``: what is learned; ``ends``: the maps that read the input and write the output; ``layouts``: the examples and their axis;
``verify``: gradients rebuilt; ``trained``: is this the network that is trained; ``examine``: the survey;
``audit``: the same checked in every chunk of the probe; ``amend``: what that has taught; ``memo``: what holds for other weights.
"""

from richter.instrument.survey.audit import (
    MOST_DOUBTS,
    PIECES,
    Audit,
    Check,
    Doubt,
    Noise,
    check_calls,
    passed,
    rounding_errors,
    until_certain,
)
from richter.instrument.survey.examine import (
           FEWEST,
           SURVEYED,
           Rebuilt,
           applied,
           check_same,
           coarsest,
           looked,
           map_gradient,
           note_called,
           remade,
           survey,
)
from richter.instrument.survey.memo import UNTRUSTED, Amendments, SurveyMemo, amended, settings, surveyed
from richter.instrument.survey.survey import (
           UNABLE,
           Forwards,
           Layout,
           MapInfo,
           Network,
           Survey,
           by_example,
           grouped,
           rounding,
           tolerance,
           with_siblings,
)

__all__ = ["FEWEST", "MOST_DOUBTS", "PIECES", "SURVEYED", "UNABLE", "UNTRUSTED", "Amendments", "Audit", "Check", "Doubt",
           "Forwards", "Layout", "MapInfo", "Network", "Noise", "Rebuilt", "Survey", "SurveyMemo", "amended", "applied",
           "by_example", "check_calls", "check_same", "coarsest", "grouped", "looked", "map_gradient", "note_called", "passed",
           "remade", "rounding", "rounding_errors", "settings", "survey", "surveyed", "tolerance", "until_certain",
           "with_siblings"]
