"""The form of a model that trains fastest on a GPU: the same parameters and buffers, planned operations. Opt-in.

Read in this order: network (fused_model), plan (layers to operations), operations, convolutions (those that hold
convolutions), weights; then the kernels (Triton): kernels (batch norm with its activation), sums, pools, stem, boxes
(decoded in validation).
tests/bench_pieces.py tells what each piece gains, tests/bench_pools.py times the pools beside torch's.
"""
