"""The optimizers on noised gradients."""
