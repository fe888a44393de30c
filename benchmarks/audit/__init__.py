"""``python -m benchmarks.audit``: does a private training keep its guarantee?

``configuration`` reads a training and asks the placement rules; its ``Stages`` make the parts of a
private step, and ``world`` plays them on simulated ranks.  ``checks`` looks at one property each:
``clipping``, ``noise``, ``memory`` (a sample shows in its own steps only, and under noise) and
``sampling``; ``chances`` limits false alarms.  ``attack`` guesses the members of a batch and
turns guesses into a lower bound of epsilon.  ``script`` audits a user's own training loop, which
``events`` observes.
"""

from benchmarks.audit.attack import Attack
from benchmarks.audit.audit import Audit, audit_configuration
from benchmarks.audit.configuration import Configuration, Stages
from benchmarks.audit.script.audit import Check, ScriptAudit, audit_script
from benchmarks.audit.script.run import Job, ScriptFailed

__all__ = [
    "Attack",
    "Audit",
    "Check",
    "Configuration",
    "Job",
    "ScriptAudit",
    "ScriptFailed",
    "Stages",
    "audit_configuration",
    "audit_script",
]
