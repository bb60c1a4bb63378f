"""Opt-in twins of utils/engine: same methods, same results, less time. Chosen in utils/run/fast_paths.py, nowhere else.

Read in this order: train_step (no waiting for the device), flat_optimizer, loss_readback, prefetcher, graph_step (the
whole step as a CUDA graph), compile (torch.compile), validation with nms and metrics (--fast-val), async_checkpoint.
Parity: tests/fast. Speed: tests/bench_step.py, tests/bench_val.py.
"""
