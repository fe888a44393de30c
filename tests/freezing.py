"""Imported last by the process that ranks are forked from: what it has is not collected again.

Otherwise the first collection, and all that looks at what is alive, copies every page of it in each
rank.
"""

import gc

gc.collect()
gc.freeze()
