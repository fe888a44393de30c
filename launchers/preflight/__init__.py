"""``comm-hooks preflight``: check that every node is ready before training starts."""

from comm_hooks.launchers.environment import check_world_size

__all__ = ["check_world_size"]
