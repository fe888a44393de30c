"""Save and load a state of its own on every rank: a protocol, rank files and DCP checkpoints."""
