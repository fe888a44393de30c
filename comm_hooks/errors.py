"""The errors of this library that are not plain ``ValueError``."""


class ConfigMismatchError(RuntimeError):
    """Ranks of one process group are configured differently.

    Raised on every rank alike, before any gradient is exchanged; names the setting and the ranks.
    """


class PayloadError(ValueError):
    """A payload is not what its receiver expects: cut short, damaged, or another round's.

    Raised before anything is decoded, so that no gradient is wrong: where ranks differ on all of
    them, where a payload was damaged on the rank that received it.  Names the rank and the reason.
    """


class PeerError(RuntimeError):
    """A collective failed because another rank has ended, is stopped, or came too late.

    Raised on every rank that is still there, naming those that are not.  Nothing has been applied;
    the process group cannot be used any more: end the process, and go on from a checkpoint.
    """
