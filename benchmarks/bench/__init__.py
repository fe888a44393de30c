"""``python -m benchmarks.bench``: the time that methods take on links of given rates.

Trains the GPT of ``python -m benchmarks.compare`` with every rank in a network namespace of its
own. ``launch`` runs one method in its network, ``worker`` one rank, ``turns`` times steps of
several methods in turn, ``results`` has the measurements, ``table`` and ``plots`` show them.
"""
