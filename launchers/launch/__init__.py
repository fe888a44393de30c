"""``comm-hooks launch``: print and run the command that starts a training on these nodes.

It starts and watches no ranks itself: torchrun, deepspeed, mpirun, Slurm and Kubernetes do.
"""
