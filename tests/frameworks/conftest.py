from tests.ranks import preload

# What the ranks of these tests import, beside what all do; absent packages are left out.
preload("accelerate", "torchmetrics", "transformers.trainer")
