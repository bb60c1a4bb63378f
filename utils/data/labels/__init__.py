"""From a path of the data yaml to a ScannedDataset. Read in this order:

image_list      the path to image files, and these to label files
rows            the text of a label file to rows
scan            all images and labels of a data set: verified, counted, repaired, reported
cache           the scan remembered, until a file changes
"""
