"""The networks. Nothing here imports utils/, but experimental, which reads models from files.

Read in this order: common (the layers), detection and yolo (detection layers, the Model), config (reads a --cfg),
multihead, multihead_attention and attention (1B4H), reparam (fusing for inference), summary. Opt-in, for training on a
GPU: fused, then fused_plan, fused_operations, fused_convolutions, fused_weights, and the kernels in fused_kernels,
fused_sums, fused_pools, fused_stem.
Checkpoints name the classes by these modules: they keep their homes and their names.
"""
