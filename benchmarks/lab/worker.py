"""One rank of one method: trains under torchrun and tells the launcher how it goes.

Rank 0 speaks for all; the others speak up only with their process id and when they fail.
"""

import gc
import os
import sys
import threading
import traceback

import torch.distributed as dist

from benchmarks.lab.events import telling
from benchmarks.lab.training import connect, read_tokens, train, worker_parser


def _exit_with_launcher() -> None:
    """End this process when the launcher is gone, however it went.

    Standard input is a pipe whose other end only the launcher holds, inherited through torchrun.
    Its end means that the launcher let go or was killed; torchrun, in a session of its own, would
    train on without it.
    """

    def wait_for_end() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def main() -> None:
    """Run one rank as told by the command line, which only ``launch`` writes."""
    arguments = worker_parser(__doc__).parse_args()
    _exit_with_launcher()

    try:
        with telling(arguments.events) as tell:
            tokens = read_tokens(arguments.corpus)
            dist.init_process_group("gloo")
            trainer = connect(arguments.method, arguments.settings)
            for event in train(trainer, arguments.settings, tokens):
                if dist.get_rank() == 0:
                    tell(event)
        # DDP's reducer must not be the last to let go of the process group: it would wait for
        # gloo's threads and hold Python's lock meanwhile, which those threads may want.
        del trainer
        gc.collect()
        dist.destroy_process_group()
    except FloatingPointError:  # diverged
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not by way of destructors, for the same reason


if __name__ == "__main__":
    main()
