"""Weights at work: from files, cameras and streams to boxes, pictures and tables.

names (what a --source means), sources (images and videos, decoded ahead in threads), streams (cameras and addresses,
which come back), predict (from images to detections), writers (pictures, labels, csv, json, crops), loop (one detection
from its first image to its last line); results and hub: the wrapper for other people's scripts. A `Frame` is one image
with where it comes from; sources yield batches of frames of one shape.
"""
