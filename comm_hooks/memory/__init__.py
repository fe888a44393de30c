"""What a rank remembers between rounds: error feedback."""

from comm_hooks.memory.base import Memory
from comm_hooks.memory.error_feedback import ErrorFeedback

__all__ = ["ErrorFeedback", "Memory"]
