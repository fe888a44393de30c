"""The exception classes of this library."""


class ConfigMismatchError(RuntimeError):
    """Ranks of one process group are configured differently.

    Raised on every rank, before any gradient is exchanged.  The message names setting and ranks.
    """


class PayloadError(ValueError):
    """A payload, one rank's compressed message, is damaged, cut short, or of another step.

    Raised before decoding, so that no wrong gradient is used: on all ranks if their steps or
    settings differ, on the receiver if a payload was damaged.  The message names rank and reason.
    """


class PeerError(RuntimeError):
    """A collective failed because another rank has ended, is stopped, or came too late.

    Raised on every remaining rank.  The message names the ranks at fault.  No step was
    taken.  The process group cannot be used any more: end the process, resume from a checkpoint.
    """
