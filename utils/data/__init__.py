"""From files to batches. Read in this order:

images, exif            read, size and verify an image file
image_list, label_rows  a path of the data yaml to image files; the text of a label file to rows
scan, label_cache       all of a data set, counted, repaired, reported, remembered
dataset, image_cache    LoadImagesAndLabels: one sample is __getitem__
transforms, affine, mosaic, paste, pixel_ops    what happens to a sample
sampler, epoch_loader, worker_errors            samples to batches
subset, stream and keyed_dataset (--seed) stand beside; fast/ is opt-in, and imported by utils/datasets.py (where a
flag asks for it), utils/fast and utils/run only.
"""
