"""The ``comm-hooks`` command line, and the laboratory that its commands and the studies share."""
