"""Small measurements, each a table that a page prints: ``python -m benchmarks.micro NAME``."""
