"""The ``comm-hooks`` command line: the commands launch, preflight and advise."""
