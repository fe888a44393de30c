"""Optimizers for private training, which step along noised gradients."""
