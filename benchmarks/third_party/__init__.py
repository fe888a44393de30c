"""Training scripts of other projects with a few edited lines, against the scripts as they are."""
