"""Save and load states that differ between ranks: a protocol, rank files, DCP checkpoints."""
