"""Attacks guess the members of a batch, and turn their guesses into a bound of epsilon."""
