"""``comm-hooks launch``: the right command for what is there, printed and run.

Nothing here starts or watches ranks: torchrun, deepspeed, mpirun, Slurm and Kubernetes do.
"""
