"""Before a number leaves: which linear maps there are, which axis of each holds the examples, do examples mix, and do the
captured ``h`` and ``g`` rebuild autograd's gradients? A survey runs a few examples several times and answers by looking, not by
trust.

``maps``: what is learned; ``ends``: the maps that read the input and write the output; ``layouts``: the examples and their axis;
``verify``: gradients rebuilt; ``trained``: is this the network that is trained; ``examine``: the survey;
``audit``: the same checked in every chunk of the probe; ``amend``: what that has taught; ``memo``: what holds for other weights.
"""

from richter.instrument.survey.amend import Amendments, amended
from richter.instrument.survey.audit import MOST_DOUBTS, PIECES, Audit, Check, Doubt, Noise, check_calls, passed, rounding_errors
from richter.instrument.survey.examine import FEWEST, SURVEYED, check_same, looked, note_called, survey
from richter.instrument.survey.layouts import UNABLE, Bench, by_example, grouped, tolerance
from richter.instrument.survey.maps import Layout, MapInfo, Survey, with_siblings
from richter.instrument.survey.memo import UNTRUSTED, SurveyMemo, settings, surveyed
from richter.instrument.survey.verify import applied, map_gradient, remade

__all__ = ["FEWEST", "MOST_DOUBTS", "PIECES", "SURVEYED", "UNABLE", "UNTRUSTED", "Amendments", "Audit", "Bench", "Check", "Doubt",
           "Layout", "MapInfo", "Noise", "Survey", "SurveyMemo", "amended", "applied", "by_example", "check_calls",
           "check_same", "grouped", "looked", "map_gradient", "note_called", "passed", "remade", "rounding_errors", "settings",
           "survey", "surveyed", "tolerance", "with_siblings"]
