"""``comm-hooks report``: one HTML page from what ``compare`` or a training of one's own recorded.

One idea per file: ``command`` (the options), ``reading`` (files), ``logs`` (the log of a training
of one's own), ``charts`` (what the curves are made of) and ``page`` (the page, with
``page.html.j2``, ``page.css``, ``table.js`` and ``charts.js``). ``comm-hooks compare`` writes its
report with the same ``page``.
"""
