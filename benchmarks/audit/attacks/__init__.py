"""Attacks on a private training: they guess who took part, and turn that into epsilon."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: what was attacked.
        audited: the epsilon that it proves, at the confidence asked for.
        claimed: the epsilon that is claimed for the same releases.
        alarm: whether the claim is disproved at the confidence of an alarm.
        details: of how it went.
    """

    name: str
    audited: float
    claimed: float
    alarm: bool
    details: dict[str, Any]

    @property
    def outcome(self) -> str:
        """``"violation"``, ``"suspicious"`` (by chance in one audit of 20) or ``"none found"``."""
        if self.alarm:
            return "violation"
        return "suspicious" if self.audited > self.claimed else "none found"
