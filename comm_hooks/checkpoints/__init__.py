"""Checkpoints: the state that every rank saves for itself, in files and in torch's distributed checkpoints."""
