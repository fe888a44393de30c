"""The errors of this library that are not plain ``ValueError``."""


class ConfigMismatchError(RuntimeError):
    """Ranks of one process group are configured differently.

    Raised on every rank alike, before any gradient is exchanged; names the setting and the ranks.
    """
