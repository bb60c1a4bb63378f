"""From files to batches, in this order: images (and exif), image_list, label_rows, label_cache, scan, image_cache, dataset
(one sample: __getitem__), transforms, affine, pixel_ops, mosaic, paste, sampler, epoch_loader, worker_errors.

subset leaves a part of a data set, stream reads images and videos for a trained model, keyed_dataset draws by --seed.
fast/ is opt-in (--worker-tensor and steps left to the GPU). Only create_dataloader (utils/datasets.py), utils/fast and
utils/run import it; nothing here does.
"""
