"""Memories, objects that keep residuals of a rank between rounds: error feedback and others."""

from comm_hooks.memory.base import Memory
from comm_hooks.memory.differences import Differences
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.memory.momentum_correction import MomentumCorrection

__all__ = ["Differences", "ErrorFeedback", "Memory", "MomentumCorrection"]
