"""Which samples are in a step: Poisson sampling, and one use of every batch."""
