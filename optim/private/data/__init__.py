"""The samples of a step: Poisson sampling, and checks that every batch is used once."""
