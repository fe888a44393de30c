"""Checkpoints of the state of each rank: one protocol, files and DCP storage."""
