"""The error of training that would not be private."""


class PrivacyError(ValueError):
    """What was asked for would not give the guarantee that it claims.

    The message names the rule that is broken and what would be valid instead.  Raised before any
    private data has been used.
    """
