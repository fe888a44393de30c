"""``python -m benchmarks.audit``: the command and its output."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

from benchmarks.audit.attack import CONFIDENCE, Attack
from benchmarks.audit.audit import Audit, audit_configuration
from benchmarks.audit.claims import Claim, claim
from benchmarks.audit.configuration import read_configuration
from benchmarks.audit.script.audit import ScriptAudit, audit_script
from benchmarks.audit.script.run import Job, ScriptFailed
from comm_hooks.launchers.output import complain, make_console, refusing, require_positive, say
from comm_hooks.optim.private.errors import PrivacyError

_NAME = "python -m benchmarks.audit"
_VIOLATED = 1
_SUSPICIOUS = 3

app = typer.Typer()


@app.command()
def audit(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Arguments of the script, after --.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The private training, as JSON: see docs/audit.md.")
    ] = None,
    attack: Annotated[bool, typer.Option(help="Check and attack the configuration.")] = True,
    script: Annotated[
        Path | None, typer.Option(help="A training script, run as it is and observed.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="Ranks of the script, as for torchrun. [default: one]")
    ] = None,
    steps: Annotated[int, typer.Option(help="Private steps of the script to observe.")] = 20,
    timeout: Annotated[float, typer.Option(help="Seconds for one run of the script.")] = 120.0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a private training: is it valid, what does it claim, does an attack disprove that?

    Exit codes: 0; 1 for a training that is not private; 2 for bad input; 3 for a suspicious
    result: run the audit again.
    """
    with refusing(_NAME):
        if script is not None:
            if config is not None:
                raise ValueError("--script is audited by itself: leave out --config")
            job = Job(script, tuple(arguments or ()), nproc_per_node, steps, timeout)
            _leave(_audit_script(job, json_))
            return
        if arguments:
            raise ValueError(f"unexpected {' '.join(arguments)}: arguments are for --script")
        if config is None:
            raise ValueError("nothing to audit: give --config or --script")
        configuration = read_configuration(config)
    try:
        verdict = configuration.judge()
    except PrivacyError as error:
        raise _invalid(str(error), json_) from None
    event = verdict.recorded(configuration.event(), configuration.placement)
    claimed = claim([event], configuration.delta, configuration.build_accountant())
    if math.isinf(claimed.epsilon):
        steps_taken = f"{claimed.steps} steps with so little noise"
        raise _invalid(f"no epsilon holds for {steps_taken}: it is infinite", json_)
    content: dict[str, Any] = {"verdict": asdict(verdict), "claim": asdict(claimed)}
    if not json_:
        say(
            f"Rule {verdict.rule}: noise placement {configuration.placement}, "
            f"{configuration.exchange['compressor']} on {configuration.world_size} ranks, "
            f"unit {configuration.unit}: valid"
        )
        _print_claim(claimed)
    found = None
    if attack and (reason := configuration.why_not_played()):
        complain(_NAME, f"not attacked: {reason}")
    elif attack:
        # Tensors are small, and on a busy machine threads wait for one another.
        torch.set_num_threads(1)
        found = audit_configuration(configuration)
        content |= _as_json(found)
        content["attack"]["outcome"] = found.attack.outcome
    if json_:
        typer.echo(json.dumps(content, indent=2))
    elif found:
        say(_conclusion(found.attack))
        for problem in found.problems:
            say(f"VIOLATION: {problem}")
    if found:
        _leave(found)


def _audit_script(job: Job, json_: bool) -> ScriptAudit:
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
        typer.echo(json.dumps(_as_json(found), indent=2))
        return found
    table = Table("check", "extent", "found", "outcome")
    for check in found.checks:
        table.add_row(*map(Text, (check.name, check.extent, check.found, check.outcome)))
    make_console().print(table)
    kinds = {"VIOLATION": found.problems, "suspicious": found.doubts, "note": found.notes}
    for label, lines in kinds.items():
        for line in lines:
            say(f"{label}: {line}")
    if not found.violated and not found.suspicious:
        say("no violation found")
    return found


def _print_claim(claimed: Claim) -> None:
    say(f"Claimed for {claimed.steps} steps, delta {claimed.delta:g}:")
    for observed, epsilon in (
        ("the model", claimed.epsilon),
        ("the model and its checkpoints", claimed.checkpoint_epsilon),
        ("the messages of single ranks", claimed.rank_epsilon),
    ):
        trusting = "nothing (ranks and links are trusted)"
        value = trusting if epsilon is None else f"epsilon {epsilon:.3f}"
        say(f"  against an observer of {observed}: {value}")


def _conclusion(attack: Attack) -> str:
    level = f"audited >= {attack.audited:.3f} at {CONFIDENCE:.0%} confidence"
    what = f"attack on {attack.steps} releases by {attack.canaries} canaries: {level}"
    if attack.outcome == "violation":
        return f"VIOLATION: {what} > claimed {attack.claimed:.3f}"
    if attack.outcome == "suspicious":
        often = f"{1 - CONFIDENCE:.0%} of all audits"
        return f"{what} > claimed {attack.claimed:.3f}, as by chance in {often}: run it again"
    return f"{what} <= claimed {attack.claimed:.3f}: no violation found"


def _as_json(found: Audit | ScriptAudit) -> dict[str, Any]:
    return {**asdict(found), "violated": found.violated, "suspicious": found.suspicious}


def _invalid(reason: str, json_: bool) -> typer.Exit:
    """Print the rules' refusal of a training and return the exit."""
    if json_:
        typer.echo(json.dumps({"error": reason, "violated": True}))
    complain(_NAME, f"INVALID: {reason}")
    return typer.Exit(_VIOLATED)


def _leave(found: Audit | ScriptAudit) -> None:
    if found.violated or found.suspicious:
        raise typer.Exit(_VIOLATED if found.violated else _SUSPICIOUS)


if __name__ == "__main__":
    app()
