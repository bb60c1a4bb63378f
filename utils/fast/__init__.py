"""Opt-in twins of utils/engine: same methods, same results, less time. Chosen in utils/run/fast_paths.py, nowhere else.

Read in this order: start (made ahead), train_step (no waiting for the device), flat_optimizer, exchange (several
processes), loss_readback, prefetcher, graph_step (the step as CUDA graphs), compile (torch.compile), validation with
nms and metrics (--fast-val), graph_network (its network as CUDA graphs), shared_validation (by all processes),
async_checkpoint. Parity: tests/fast. Speed: tests/bench_step.py, bench_val.py, bench_epoch_change.py,
profile_training_loop.py.
"""
