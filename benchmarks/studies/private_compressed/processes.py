"""The same runs over gloo: one process per rank."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.studies.private_compressed.schemes import Study, train_rank
from benchmarks.studies.private_training import PrivatePoint, diverging_ignored
from benchmarks.studies.runs import Diverged, Outcome, Point, Run, Settings


def repeat_over_gloo(study: Study, simulated: Outcome) -> Outcome:
    """Run the first seed of a method with real processes; return the outcome.

    Args:
        study: what all methods share.
        simulated: the outcome whose settings are taken; its scheme must have a placement.
    """
    first = simulated.runs[0]
    labels = {**simulated.labels, "over": "gloo"}
    with tempfile.TemporaryDirectory() as folder:
        arguments = (
            study,
            simulated.name,
            simulated.labels["optimizer"],
            first.settings,
            first.seed,
            simulated.labels["ranks"],
            folder,
        )
        spawn(_serve, arguments, nprocs=simulated.labels["ranks"])
        found = torch.load(Path(folder) / "curve.pt", weights_only=True)
    curve: list[Point] = [PrivatePoint(**point) for point in found["points"]]
    run = Run(first.seed, first.settings, curve, found["diverged"])
    return Outcome(simulated.name, labels, simulated.note, [run], [run])


def _serve(
    rank: int,
    study: Study,
    scheme: str,
    optimizer: str,
    settings: Settings,
    seed: int,
    ranks: int,
    folder: str,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    diverged = False
    curve: Sequence[Point]
    try:
        with diverging_ignored():
            curve = train_rank(study, scheme, optimizer, settings, seed, lambda: None, None)
    except Diverged as error:
        # All ranks have the same model, so all of them end here.
        curve, diverged = error.args, True
    finally:
        dist.destroy_process_group()
    if rank == 0:
        points = [vars(point) for point in curve]
        torch.save({"points": points, "diverged": diverged}, Path(folder) / "curve.pt")
