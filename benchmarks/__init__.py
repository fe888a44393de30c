"""What the README claims, as commands that anyone can run."""
