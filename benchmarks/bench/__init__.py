"""``python -m benchmarks.bench``: what methods cost in time on links of given rates.

Trains the GPT of ``python -m benchmarks.compare`` with every rank in a network namespace of its own. One idea
per file: ``command`` (the options), ``rates``, ``launch`` (one method in its network), ``worker``
(one rank), ``turns`` (timing steps of several trainers so that they can be compared), ``results``
(what was measured), ``table`` and ``plots`` (what people read).
"""
