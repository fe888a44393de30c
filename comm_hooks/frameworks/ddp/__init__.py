"""DistributedDataParallel: a state, a communication hook, and a one-line way to register it."""
