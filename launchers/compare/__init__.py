"""``comm-hooks compare``: train the same small GPT once per method and report what each one costs.

One idea per file, in the order a comparison goes through them: ``command`` (the options),
``corpus`` (the text), ``methods`` (what can be compared), ``launch`` (torchrun, one method at a
time), ``progress`` (how it goes), ``worker`` and ``model`` (one rank), ``runs`` (what was
measured), ``table``, ``plots`` and ``report`` (what people read).
"""
