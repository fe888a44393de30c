"""What ``python -m benchmarks.audit`` does: look a private configuration up, then attack it."""

import json
import math
from pathlib import Path

import torch
import typer

from benchmarks.audit.audit import Audit, Claim, audit_configuration, why_not_played
from benchmarks.audit.configuration import read_configuration, read_ledger
from benchmarks.audit.report import (
    as_json,
    print_audit,
    print_claim,
    print_script_audit,
    script_as_json,
)
from benchmarks.audit.script.audit import ScriptAudit, audit_script
from benchmarks.audit.script.run import Job, ScriptFailed
from comm_hooks.launchers.output import complain, refusing, require_positive
from comm_hooks.optim.private.accounting import RDPAccountant
from comm_hooks.optim.private.accounting.accountant import require_delta
from comm_hooks.optim.private.errors import PrivacyError

_VIOLATED = 1
_SUSPICIOUS = 3


def audit(
    *,
    arguments: list[str] | None,
    config: Path | None,
    ledger: Path | None,
    delta: float | None,
    attack: bool,
    script: Path | None,
    nproc_per_node: int | None,
    steps: int,
    timeout: float,
    confidence: float,
    json_: bool,
) -> None:
    """Do what ``python -m benchmarks.audit --help`` says."""
    if script is not None:
        with refusing("python -m benchmarks.audit"):
            if config is not None or ledger is not None:
                raise ValueError("--script is audited by itself: leave out --config and --ledger")
            job = Job(script, tuple(arguments or ()), nproc_per_node, steps, timeout)
            _leave(_audit_script(job, json_))
        return
    with refusing("python -m benchmarks.audit"):
        if arguments:
            raise ValueError(f"unexpected {' '.join(arguments)}: arguments are for --script")
        if config is None and ledger is None:
            raise ValueError("nothing to audit: give --config, --ledger or --script")
        if delta is not None:
            require_delta(delta, "--delta")
        if not 0 < confidence < 1:
            raise ValueError(f"--confidence must be between 0 and 1, got {confidence:g}")
        configuration = read_configuration(config) if config else None
        if configuration is None and delta is None:
            raise ValueError("--ledger without --config needs --delta")
        events = read_ledger(ledger) if ledger else []
        if ledger and not events:
            raise ValueError(f"--ledger {ledger}: no step has been taken")
        accountant = configuration.build_accountant() if configuration else RDPAccountant()
    try:
        verdict = configuration.judge() if configuration else None
    except PrivacyError as error:
        raise _invalid(str(error), json_) from None
    used = delta if delta is not None else configuration.delta if configuration else 0.0
    if configuration and verdict and not events:
        events = [verdict.recorded(configuration.event(), configuration.placement)]
    claim = Claim.of(events, used, accountant)
    if math.isinf(claim.epsilon):
        raise _invalid(
            f"no epsilon holds for {claim.steps} steps with so little noise: it is infinite", json_
        )
    if not json_:
        print_claim(configuration, claim, verdict, str(ledger) if ledger else None)
    found = None
    if configuration and attack:
        reason = why_not_played(configuration)
        if reason:
            complain("python -m benchmarks.audit", f"not attacked: {reason}")
        else:
            # Small tensors, and on a busy machine threads would wait for one another.
            torch.set_num_threads(1)
            found = audit_configuration(configuration, confidence=confidence)
    if json_:
        typer.echo(json.dumps(as_json(claim, verdict, found, confidence), indent=2))
    elif found:
        print_audit(found, confidence)
    if found:
        _leave(found)


def _audit_script(job: Job, json_: bool) -> ScriptAudit:
    """Audit a script and print what was found.

    Raises:
        ValueError: for settings out of range.
    """
    counts = {"--nproc-per-node": job.processes, "--steps": job.steps}
    require_positive({**counts, "--timeout": job.timeout})
    try:
        found = audit_script(job)
    except ScriptFailed as failed:
        if failed.refused:
            raise _invalid(failed.refused, json_) from None
        if json_:
            typer.echo(json.dumps({"error": str(failed), "violated": False}))
        elif failed.trace:
            typer.echo(failed.trace.rstrip(), err=True)
        raise
    if json_:
        typer.echo(json.dumps(script_as_json(found), indent=2))
    else:
        print_script_audit(found)
    return found


def _invalid(reason: str, json_: bool) -> typer.Exit:
    """Say that the rules refuse a training, and return how to end."""
    if json_:
        typer.echo(json.dumps({"error": reason, "violated": True}))
    complain("python -m benchmarks.audit", f"INVALID: {reason}")
    return typer.Exit(_VIOLATED)


def _leave(found: Audit | ScriptAudit) -> None:
    if found.violated or found.suspicious:
        raise typer.Exit(_VIOLATED if found.violated else _SUSPICIOUS)
