"""``comm-hooks audit``: does a private configuration keep what it claims?

``configuration`` reads one and asks the rules; ``stages`` are the parts of a private step that can
be replaced, ``world`` plays them on simulated ranks; ``releases`` and ``sampling`` attack them with
canaries, ``repeats`` looks for randomness that is used twice; ``bounds`` and ``one_run`` turn
guesses into epsilon; ``audit``, ``report`` and ``command`` put it together.
"""

from comm_hooks.launchers.audit.audit import Attack, Audit, audit_configuration
from comm_hooks.launchers.audit.bounds import epsilon_lower_bound, gaussian_lower_bound
from comm_hooks.launchers.audit.configuration import Configuration
from comm_hooks.launchers.audit.one_run import OneRunAudit, audit_one_run
from comm_hooks.launchers.audit.stages import Stages

__all__ = [
    "Attack",
    "Audit",
    "Configuration",
    "OneRunAudit",
    "Stages",
    "audit_configuration",
    "audit_one_run",
    "epsilon_lower_bound",
    "gaussian_lower_bound",
]
