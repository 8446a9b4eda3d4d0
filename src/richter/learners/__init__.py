"""Learners of features without back-propagation: kernel machines that learn their metric from their own gradients.

    model = richter.learners.RFMClassifier().fit(X, y)      # bandwidth, ridge and iterations are chosen
    model.predict(X_new); model.feature_importances_; model.feature_matrix_
"""

from richter.learners.distances import distances, squared_distances
from richter.learners.features import agop, fact
from richter.learners.kernel import Kernel, Tunable
from richter.learners.kernels import NNGP, NTK, ConvolutionalNTK, Exponential, Gaussian, Laplace, LaplaceL1, Quadratic, Radial
from richter.learners.pipeline import tabular
from richter.learners.rfm import KernelRidge, RFMClassifier, RFMRegressor

__all__ = ["NNGP", "NTK", "ConvolutionalNTK", "Exponential", "Gaussian", "Kernel", "KernelRidge", "Laplace", "LaplaceL1",
           "Quadratic", "RFMClassifier", "RFMRegressor", "Radial", "Tunable", "agop", "distances", "fact", "squared_distances",
           "tabular"]
