"""Attacks on a private training: they guess who took part, and turn that into epsilon."""
