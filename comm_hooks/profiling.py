"""What ``torch.profiler`` shows of an exchange: ranges around its four kinds of work.

On a GPU they show when work was queued, and its kernels lie below them in a trace's timeline.  On
gloo a hook's exchange runs in a thread of its own, which a profiler sees that was told to look at
all threads (``docs/tracking.md``).
"""

from torch.profiler import record_function

COMPRESS = "comm_hooks::compress"
"""Payloads are made of vectors; what memory keeps is part of it."""
SEND = "comm_hooks::send"
"""A collective, from its start until all payloads are there; on a GPU: until it is queued."""
WAIT = "comm_hooks::wait"
"""A backward pass is over, and waits for the exchanges that go on beside it."""
DECODE = "comm_hooks::decode"
"""The mean is made of payloads."""

__all__ = ["COMPRESS", "DECODE", "SEND", "WAIT", "record_function"]
