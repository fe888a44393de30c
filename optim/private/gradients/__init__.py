"""Clipped sums of per-sample gradients, and the models that allow them."""
