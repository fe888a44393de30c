"""Names of the ranges that ``torch.profiler`` shows of an exchange.

On a GPU a range shows when work was queued, and its kernels are below it in the timeline.  On gloo
the exchange of a hook runs in a thread of its own, which the profiler must be told to record
(``docs/tracking.md``).
"""

from torch.profiler import record_function

COMPRESS = "comm_hooks::compress"
"""The range of encoding vectors into payloads, the memory included."""
SEND = "comm_hooks::send"
"""The range of a collective, from its start to its end; on a GPU: until it is queued."""
WAIT = "comm_hooks::wait"
"""The range in which a finished backward pass waits for its exchanges."""
DECODE = "comm_hooks::decode"
"""The range of decoding payloads into their mean."""

__all__ = ["COMPRESS", "DECODE", "SEND", "WAIT", "record_function"]
