"""``python -m benchmarks.compare``: train the same small GPT once per method and report what each one costs.

``command`` has the options, ``worker`` is one rank, ``plots`` are files for documents; the page is
that of ``python -m benchmarks.report``, and all else is made in :mod:`benchmarks.lab`.
"""
