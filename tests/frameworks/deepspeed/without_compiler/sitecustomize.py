"""On PYTHONPATH: keeps DeepSpeed from compiling an extension that gloo does not use."""

import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
