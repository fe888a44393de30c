"""``python -m benchmarks.report``: one HTML page from what ``compare`` or a training of one's own recorded.

``command`` has the options; ``reading`` and ``logs`` read files. ``groups`` (means over seeds),
``conclusions`` and ``table`` say what the figures mean, in the terminal, too. ``charts`` and
``page`` make the page, of ``page.html.j2``, ``page.css``, ``table.js`` and ``charts.js``.
"""
