"""DistributedDataParallel: a communication hook, its state, and one call that registers them."""
