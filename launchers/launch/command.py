"""``comm-hooks launch``."""

from pathlib import Path
from typing import Annotated

import typer

from comm_hooks.launchers.launch.job import LAUNCHERS
from comm_hooks.launchers.launch.submission import RUNTIME


def launch(
    target: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="What every rank runs.")
    ],
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(help="Processes per node. [default: one per GPU, else 1]")
    ] = None,
    nnodes: Annotated[
        str | None,
        typer.Option(
            metavar="N|MIN:MAX",
            help="Nodes; a range for an elastic job. [default: those of the hostfile, else 1]",
        ),
    ] = None,
    node_rank: Annotated[
        int | None,
        typer.Option(help="Which node this is, counted from 0. Without it torchrun decides."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Where nodes meet; the same on all of them."),
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="Network interface. [default: the one that leads to --head]")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable for all ranks; may be repeated."),
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="How often torchrun starts ranks anew.")] = 0,
    launcher: Annotated[
        str, typer.Option(metavar="NAME", help=f"One of {', '.join(LAUNCHERS)}.")
    ] = "auto",
    hostfile: Annotated[
        Path | None, typer.Option(help="For deepspeed and mpirun: lines of 'name slots=N'.")
    ] = None,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Check all nodes first; see comm-hooks preflight.")
    ] = False,
    config: Annotated[
        str | None, typer.Option(help="With --preflight: a file that must be alike on all nodes.")
    ] = None,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the head to listen; 0 asks once.")
    ] = 60.0,
    slurm: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a file for sbatch instead.")
    ] = None,
    kubernetes: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Kubeflow TrainJob instead.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Of the Slurm or Kubernetes job. [default: the script's]")
    ] = None,
    cpus: Annotated[
        int | None, typer.Option(help="Cores per process, for --slurm and --kubernetes.")
    ] = None,
    cpu: Annotated[
        bool, typer.Option("--cpu", help="Ask Slurm or Kubernetes for no GPUs.")
    ] = False,
    sbatch: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="An #SBATCH line for --slurm; may be repeated."),
    ] = None,
    image: Annotated[str | None, typer.Option(help="Container image for --kubernetes.")] = None,
    runtime: Annotated[str, typer.Option(help="ClusterTrainingRuntime.")] = RUNTIME,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be run or written; do nothing.")
    ] = False,
) -> None:
    """Start a training script on this machine, or on this node of several.

    Finds out what is there (a Slurm job, mpirun, a hostfile, or nothing), prints the command for
    it, which can be pasted into a shell, and runs it. Options go before SCRIPT. Exit codes: that of
    the command; 2 for bad input and for a head that does not answer, before anything is started.
    """
    from comm_hooks.launchers.launch import run

    run.launch(
        target=target,
        module=module,
        nproc=nproc,
        nnodes=nnodes,
        node_rank=node_rank,
        head=head,
        interface=interface,
        env=env,
        max_restarts=max_restarts,
        launcher=launcher,
        hostfile=hostfile,
        preflight=preflight,
        config=config,
        wait=wait,
        slurm=slurm,
        kubernetes=kubernetes,
        name=name,
        cpus=cpus,
        cpu=cpu,
        sbatch=sbatch,
        image=image,
        runtime=runtime,
        dry_run=dry_run,
    )
