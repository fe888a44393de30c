"""Names of the ranges that ``torch.profiler`` shows for an exchange of gradients.

On a GPU a range shows when work was queued; its kernels are below it in the timeline.  On gloo the
exchange of a DDP hook runs in a separate thread, which the profiler records only with the settings
in ``docs/tracking.md``.
"""

from torch.profiler import record_function

COMPRESS = "comm_hooks::compress"
"""The range of encoding vectors into payloads, including error feedback."""
SEND = "comm_hooks::send"
"""The range of a collective, from its start to its end; on a GPU: until it is queued."""
WAIT = "comm_hooks::wait"
"""The range in which a finished backward pass waits for its exchanges."""
DECODE = "comm_hooks::decode"
"""The range of decoding payloads into their mean."""

__all__ = ["COMPRESS", "DECODE", "SEND", "WAIT", "record_function"]
