import os

from tests.ranks import preload

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# Imports of these tests' ranks; absent packages are left out.
preload("accelerate", "deepspeed", "torchmetrics", "transformers.trainer")
