"""What a method keeps of what exchanging is worth: tasks x ranks x batches x lengths x methods.

``python -m benchmarks.quality`` runs what has no record yet and writes the page;
``docs/choosing.md`` rests on it.
"""
