"""What a run tells: progress bar, results.txt, results.csv, TensorBoard, images; how busy the machine is.

Read in this order: results (open_report gives a run its report), tensorboard (the event file), monitor (use of CPU,
GPU and memory).
"""
