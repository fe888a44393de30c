"""The noise of private training: its placement, its distribution and its source of randomness."""
