"""``python -m benchmarks.compare``: train the same small GPT once per method; report the costs."""
