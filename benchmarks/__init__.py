"""What the documentation claims, as commands that anyone can run."""
