"""Before a number leaves: which linear maps there are, which axis of each holds the examples, do examples mix, and do the
captured ``h`` and ``g`` rebuild autograd's gradients? A survey runs a few examples several times and answers by looking, not by
trust.

``maps``: what is learned; ``layouts``: the examples and their axis; ``verify``: gradients rebuilt; ``examine``: the survey;
``memo``: what holds for other weights too.
"""

from richter.instrument.survey.examine import SURVEYED, survey
from richter.instrument.survey.layouts import by_example, grouped
from richter.instrument.survey.maps import Layout, MapInfo, Survey
from richter.instrument.survey.memo import SurveyMemo, surveyed
from richter.instrument.survey.verify import map_gradient, tolerance

__all__ = ["SURVEYED", "Layout", "MapInfo", "Survey", "SurveyMemo", "by_example", "grouped", "map_gradient", "survey", "surveyed",
           "tolerance"]
