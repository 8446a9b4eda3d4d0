"""What measures are made of, each computed once: statistics of weights, moments over examples, gradients, kernels over pairs of
examples, and functions of these. A statistic of your own is a class with ``begin``: see frame.py and docs/extending.md."""

from richter.instrument.statistics.feature_matrices import (
    AGOP,
    CENTRED_AGOP,
    CENTRED_NFM,
    CENTRED_PAIR,
    CHANGE,
    DOUBLE_CENTRED_PAIR,
    INITIAL_WEIGHT,
    MATRIX,
    NFM,
    NFM_AND_AGOP,
    OWN_CHANGE,
    OWN_WEIGHT,
    PTK_CENTRED_PAIR,
    WEIGHT,
    Factor,
    FeatureMatrix,
    OfWeight,
    Pair,
    egop,
    feature_matrix,
)
from richter.instrument.statistics.features import CLASSES, FEATURES, SAMPLE, Classes, Features, OfLayer, Rows, Sample
from richter.instrument.statistics.frame import GROUPS, Derived, Gathering, Missing, Reading, Simple, Statistic, Wants, leaves
from richter.instrument.statistics.kernels import LABELS, TANGENT_KERNEL, Gram, Labels
from richter.instrument.statistics.moments import PTK_CHANGE, PTK_COVARIANCE, Moment, Sketched
from richter.instrument.statistics.movement import (
    FEATURE_CHANGE,
    FUNCTION_CHANGE,
    LINEARISATION,
    FeatureChange,
    FunctionChange,
    Gap,
    Linearisation,
    Moved,
    Turned,
)
from richter.instrument.statistics.operators import WEIGHT_GRADIENT, Gradient, Operator, Products, Trace
from richter.instrument.statistics.outputs import OUTPUTS, SPREAD, WEIGHT_DECAY, Answers, OfProbe, Outputs, Spread
from richter.instrument.statistics.per_output import (
    CROSS_OUTPUT,
    OWN_KERNELS,
    SAME_OUTPUT,
    SINCE_INITIAL,
    SINCE_PREVIOUS,
    STEP,
    CrossOutput,
    Evolved,
)
from richter.instrument.statistics.sketches import CENTRED_KERNEL
from richter.instrument.statistics.variants import HeldOut, Initial, Previous

__all__ = ["AGOP", "CENTRED_AGOP", "CENTRED_KERNEL", "CENTRED_NFM", "CENTRED_PAIR", "CHANGE", "CLASSES", "CROSS_OUTPUT",
           "DOUBLE_CENTRED_PAIR", "FEATURES", "FEATURE_CHANGE", "FUNCTION_CHANGE", "GROUPS", "INITIAL_WEIGHT", "LABELS",
           "LINEARISATION", "MATRIX", "NFM", "NFM_AND_AGOP", "OUTPUTS", "OWN_CHANGE", "OWN_KERNELS", "OWN_WEIGHT",
           "PTK_CENTRED_PAIR", "PTK_CHANGE", "PTK_COVARIANCE", "SAME_OUTPUT", "SAMPLE", "SINCE_INITIAL", "SINCE_PREVIOUS",
           "SPREAD", "STEP", "TANGENT_KERNEL", "WEIGHT", "WEIGHT_DECAY", "WEIGHT_GRADIENT", "Answers", "Classes",
           "CrossOutput", "Derived", "Evolved", "Factor", "FeatureChange", "FeatureMatrix", "Features", "FunctionChange",
           "Gap", "Gathering", "Gradient", "Gram", "HeldOut", "Initial", "Labels", "Linearisation", "Missing", "Moment",
           "Moved", "OfLayer", "OfProbe", "OfWeight", "Operator", "Outputs", "Pair", "Previous", "Products", "Reading", "Rows",
           "Sample", "Simple", "Sketched", "Spread", "Statistic", "Trace", "Turned", "Wants", "egop",
           "feature_matrix", "leaves"]
