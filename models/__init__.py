"""The networks. From utils/ they import what reads a yaml; only experimental, which loads checkpoints, imports more.

Read in this order: common (the layers), detection and yolo (detection layers, the Model), config (reads a --cfg),
multihead, multihead_attention and attention (1B4H), reparam (fusing for inference), summary; fused/ is opt-in, for
training on a GPU.
Checkpoints name the classes by these modules: they keep their homes and their names.
"""
