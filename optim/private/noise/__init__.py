"""Noise: its placement, its distribution and its randomness."""
