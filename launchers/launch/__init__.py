"""``comm-hooks launch``: print and run the command that starts a training on these nodes.

It does not start or watch ranks itself: torchrun, mpirun, Slurm and Kubernetes do.
"""
