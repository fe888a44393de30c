"""The errors of this library that are not plain ``ValueError``."""


class ConfigMismatchError(RuntimeError):
    """Ranks of one process group are configured differently.

    Raised on every rank, before any gradient is exchanged.  The message names the setting and the
    ranks.
    """


class PayloadError(ValueError):
    """A payload is damaged, cut short, or of another round.

    Raised before decoding, so that no gradient is wrong: on all ranks if ranks differ, on the
    receiver if a payload was damaged.  The message names the rank and the reason.
    """


class PeerError(RuntimeError):
    """A collective failed because another rank has ended, is stopped, or came too late.

    Raised on every remaining rank.  The message names the ranks at fault.  The step was not taken,
    and the process group cannot be used any more: end the process, and resume from a checkpoint.
    """
