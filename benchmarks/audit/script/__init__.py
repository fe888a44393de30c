"""``python -m benchmarks.audit --script``: the audit of a training as it is.

``audit`` says what is run and what must hold.  ``run`` starts the processes of one run.  In them,
``observer`` watches what the script does to its model (``watched``), at which of its lines
(``places``), and at which methods of the library (:mod:`benchmarks.audit.events`); ``planting``
changes a sample, of a step's batch (``draws``), of what the data set is made of (``sources``), or
a client's (``clients``).  ``twins`` compares runs that must be alike, ``noise`` judges those that
must not.
"""

from benchmarks.audit.script.audit import Check, ScriptAudit, audit_script
from benchmarks.audit.script.run import Job, ScriptFailed

__all__ = ["Check", "Job", "ScriptAudit", "ScriptFailed", "audit_script"]
