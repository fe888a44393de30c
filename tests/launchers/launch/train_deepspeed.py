"""A DeepSpeed training of two ranks, for the two-node test: python train_deepspeed.py FOLDER."""

import argparse
import warnings
from pathlib import Path

import deepspeed
import deepspeed.ops

from comm_hooks.frameworks.deepspeed import initialize
from tests.launchers.launch.measured import STEPS, batch, make_model, measure

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "comm_hooks": {"compressor": "topk", "density": 1 / 8},
}


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    # Would be compiled first, which takes a minute.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    model = make_model()
    engine, _, _, _ = initialize(model=model, config=CONFIG)

    def steps() -> None:
        for step in range(STEPS):
            engine.backward(engine(batch(step)).square().mean())
            engine.step()

    measure(steps, engine.comm_hooks.stats, model, folder)
    deepspeed.comm.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--local_rank")  # what the deepspeed launcher adds
    main(parser.parse_args().folder)
