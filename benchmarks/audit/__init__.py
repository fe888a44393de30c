"""``python -m benchmarks.audit``: does a private configuration keep what it claims?

``configuration`` reads one and asks the rules; ``stages`` are the parts of a private step that can
be replaced, and ``world`` plays them on simulated ranks.

``checks`` look for one property each, and say in a line what is wrong: ``clipping`` (one sample,
one C), ``noise`` (normal, large enough everywhere, never used twice, also in what single ranks
send), ``memory`` (what was changed in one step shows in that step alone, and nothing is released
without noise) and ``sampling`` (each sample and step for itself).  ``chances`` has the budget of
their false alarms.

``attacks`` guess who took part: ``releases``, knowing who was drawn, and ``training``, not knowing
it.  ``bounds`` and ``one_run`` turn guesses into epsilon.

``audit``, ``report`` and ``run`` put it together.  ``script`` audits a user's own training,
unchanged, with and without a sample.
"""

from benchmarks.audit.attacks import Attack
from benchmarks.audit.attacks.bounds import epsilon_lower_bound, gaussian_lower_bound
from benchmarks.audit.attacks.one_run import OneRunAudit, audit_one_run
from benchmarks.audit.audit import Audit, audit_configuration
from benchmarks.audit.configuration import Configuration
from benchmarks.audit.script import (
    Check,
    Job,
    ScriptAudit,
    ScriptFailed,
    audit_script,
)
from benchmarks.audit.stages import Stages

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
