"""Files, memory, processes and random generators: what every other package stands on. Imports nothing of the project.

Read in this order: driver (of the GPU, before torch), files (find files, write them whole or not at all, text of any
origin), folder_lock (one process owns a run folder), memory (shared between processes), cores (how many there are to
use), compilers (what Triton needs), random_state (generators as plain values), distributed (devices, ranks, seeds).
"""
