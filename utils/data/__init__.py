"""From files to batches. Read in this order:

images/, labels/        one image file; all of a data set: its images, the rows of their label files
dataset                 LoadImagesAndLabels: one sample is __getitem__
training_size, image_cache                      its image at the size of the training, from the cache or the file
transforms, affine, mosaic, paste, pixel_ops    what happens to a sample
sampler, epoch_loader, worker_errors            samples to batches
subset, stream and keyed_dataset (--seed) stand beside; fast/ is opt-in, and imported by utils/datasets.py (where a
flag asks for it), utils/fast and utils/run only.
"""
