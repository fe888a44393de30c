"""``comm-hooks audit``: does a private configuration keep what it claims?

``configuration`` reads one and asks the rules; ``stages`` are the parts of a private step that can
be replaced, ``world`` plays them on simulated ranks; ``releases`` and ``sampling`` attack them with
canaries, ``repeats`` looks for randomness that is used twice; ``bounds`` and ``one_run`` turn
guesses into epsilon; ``audit``, ``report`` and ``command`` put it together.

``script`` audits a user's own training: ``script_run`` runs it with and without a sample,
``script_observer``, ``script_planting`` and ``script_sources`` are in its processes, and
``script_twins`` and ``script_noise`` compare what they have seen.
"""

from comm_hooks.launchers.audit.audit import Attack, Audit, audit_configuration
from comm_hooks.launchers.audit.bounds import epsilon_lower_bound, gaussian_lower_bound
from comm_hooks.launchers.audit.configuration import Configuration
from comm_hooks.launchers.audit.one_run import OneRunAudit, audit_one_run
from comm_hooks.launchers.audit.script import Check, ScriptAudit, audit_script
from comm_hooks.launchers.audit.script_run import Job, ScriptFailed
from comm_hooks.launchers.audit.stages import Stages

__all__ = [
    "Attack",
    "Audit",
    "Check",
    "Configuration",
    "Job",
    "OneRunAudit",
    "ScriptAudit",
    "ScriptFailed",
    "Stages",
    "audit_configuration",
    "audit_one_run",
    "audit_script",
    "epsilon_lower_bound",
    "gaussian_lower_bound",
]
