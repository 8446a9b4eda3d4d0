"""Experiments on the stepwise nature of self-supervised learning."""
