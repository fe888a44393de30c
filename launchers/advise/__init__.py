"""``comm-hooks advise``: predict the step time of each method on a link, and recommend one.

A prediction (:mod:`.cost_model`) adds up the payloads and the arithmetic of a method
(:mod:`.methods`) on a link of a given bandwidth.  A recommendation (:mod:`.recommend`) also needs
the quality that the method kept where it was measured (:mod:`.quality`).
"""
