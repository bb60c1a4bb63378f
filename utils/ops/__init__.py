"""Pure functions of tensors and arrays: boxes, polygons, NMS; and what CUDA graphs need (cuda_graph).

Imports nothing of the project outside this package.
"""
