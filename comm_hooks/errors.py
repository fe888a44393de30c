"""The errors of this library that are not plain ``ValueError``."""


class ConfigMismatchError(RuntimeError):
    """Ranks of one process group are configured differently.

    Raised on every rank alike, before any gradient is exchanged; names the setting and the ranks.
    """


class PayloadError(ValueError):
    """A payload is not what its receiver expects: cut short, damaged, or another round's.

    Raised on the rank that received it, before anything is decoded, so that no gradient is wrong.
    """
