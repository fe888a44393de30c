"""The parts of payloads: headers with stamps and checksums, and coded places and values."""
