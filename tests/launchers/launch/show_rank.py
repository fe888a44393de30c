"""What a launched rank finds: python show_rank.py FOLDER [ARGS]... writes FOLDER/<rank>.json."""

import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

if __name__ == "__main__":
    dist.init_process_group("gloo")
    everybody: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, dist.get_rank())
    found = {
        "ranks": everybody,
        "local_rank": os.environ["LOCAL_RANK"],
        "arguments": sys.argv[2:],
        "note": os.environ.get("NOTE"),
    }
    Path(sys.argv[1], f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
