"""The ``comm-hooks`` command line: what starts processes, and nothing that trains by itself."""
