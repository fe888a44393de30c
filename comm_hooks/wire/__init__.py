"""The encoding of payloads: headers with checksums, and codes for indices and values."""
