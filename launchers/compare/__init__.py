"""``comm-hooks compare``: train the same small GPT once per method and report what each one costs.

One idea per file, in the order a comparison goes through them: ``command`` and ``options`` (what
users ask for), ``corpus`` (the text), ``methods`` (what can be compared), ``launch`` (torchrun, one
method at a time), ``events`` (what the ranks tell meanwhile), ``progress`` (how it goes),
``worker`` and ``model`` (one rank), ``runs`` and ``plain`` (what was measured), ``groups`` (means
over seeds), ``conclusions``, ``table``, ``looks`` and ``plots`` (what people
read). The page is that of ``comm-hooks report``.
"""
