"""How much noise is added, where, and from which randomness."""
