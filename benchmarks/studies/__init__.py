"""Studies: how methods compare on real tasks, one command each."""
