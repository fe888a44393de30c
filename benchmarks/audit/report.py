"""What people and programs see of an audit."""

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.audit.attacks import Attack
from benchmarks.audit.audit import Audit, Claim
from benchmarks.audit.configuration import Configuration
from benchmarks.audit.script.audit import ScriptAudit
from comm_hooks.launchers.output import make_console, say
from comm_hooks.optim.private.noise.placement import Verdict


def as_json(
    claim: Claim, verdict: Verdict | None, audit: Audit | None, confidence: float
) -> dict[str, Any]:
    """Return all of it as plain values."""
    content: dict[str, Any] = {"claim": asdict(claim)}
    if verdict:
        content["verdict"] = asdict(verdict)
    if audit:
        content["confidence"] = confidence
        content["attacks"] = [{**asdict(a), "outcome": a.outcome} for a in audit.attacks]
        content["problems"] = audit.problems
        content["violated"] = audit.violated
        content["suspicious"] = audit.suspicious
    return content


def print_claim(
    configuration: Configuration | None,
    claim: Claim,
    verdict: Verdict | None,
    ledger: str | None,
) -> None:
    """Print the rule and what it promises."""
    if configuration and verdict:
        compressor = configuration.exchange["compressor"]
        say(
            f"Rule {verdict.rule}: noise placement {configuration.placement}, {compressor} on "
            f"{configuration.world_size} ranks, unit {configuration.unit}: valid"
        )
    of = f"{claim.steps} steps" + (f" in {ledger}" if ledger else "")
    say(f"Claimed for {of}, delta {claim.delta:g}:")
    say(f"  who sees the model: epsilon {claim.epsilon:.3f}")
    for what, epsilon in (
        ("the model and its checkpoints", claim.checkpoint_epsilon),
        ("what single ranks send", claim.rank_epsilon),
    ):
        trusting = "nothing (ranks and links are trusted)"
        say(f"  who sees {what}: {trusting if epsilon is None else f'epsilon {epsilon:.3f}'}")


def print_audit(audit: Audit, confidence: float) -> None:
    """Print each attack, and what is wrong."""
    table = Table("attack on", "steps", "canaries", "audited epsilon", "claimed", "outcome")
    for attack in audit.attacks:
        details = attack.details
        table.add_row(
            attack.name,
            str(details["steps"]),
            str(details["canaries"]),
            f">= {attack.audited:.3f}",
            f"{attack.claimed:.3f}",
            attack.outcome,
        )
    make_console().print(table)
    for attack in audit.attacks:
        say(_conclusion(attack, confidence))
    for problem in audit.problems:
        say(f"VIOLATION: {problem}")


def script_as_json(audit: ScriptAudit) -> dict[str, Any]:
    """Return the audit of a script as plain values."""
    return {**asdict(audit), "violated": audit.violated, "suspicious": audit.suspicious}


def print_script_audit(audit: ScriptAudit) -> None:
    """Print what was looked at in a script, and what is wrong."""
    table = Table("looked at", "extent", "found", "outcome")
    for check in audit.checks:
        table.add_row(*map(Text, (check.name, check.extent, check.found, check.outcome)))
    make_console().print(table)
    for label, lines in (
        ("VIOLATION", audit.problems),
        ("suspicious", audit.doubts),
        ("note", audit.notes),
    ):
        for line in lines:
            say(f"{label}: {line}")
    if not audit.violated and not audit.suspicious:
        say("no violation found")


def _conclusion(attack: Attack, confidence: float) -> str:
    level = f"audited >= {attack.audited:.3f} at {confidence:.6g} confidence"
    what = f"{attack.name.split(',')[0]}: "
    if attack.outcome == "violation":
        return f"VIOLATION: {what}{level} > claimed {attack.claimed:.3f}"
    if attack.outcome == "suspicious":
        return (
            f"{what}{level} > claimed {attack.claimed:.3f}, as chance has it in "
            f"{1 - confidence:.2g} of all audits: run it again"
        )
    return f"{what}{level} <= claimed {attack.claimed:.3f}: no violation found"
