"""Pure functions of tensors and arrays: boxes, polygons, NMS; and the capturing of CUDA graphs. Imports nothing above."""
