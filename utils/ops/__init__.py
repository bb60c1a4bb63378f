"""Pure functions of tensors and arrays: boxes, polygons, NMS; and the capturing of CUDA graphs.

Read in this order: boxes (formats, IoU), polygons (outlines of objects), nms, cuda_graph (one tool for loss and step).
"""
