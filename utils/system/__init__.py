"""Files, memory, processes and random generators: what every other package stands on. Imports nothing of the project.

Read in this order: driver (of the GPU, before torch), files (find files, write them whole or not at all, text of any
origin), folder_lock (one process owns a run folder), streams (standard output that lasts), memory (shared between
processes; how much is free), cores (how many there are to use), compilers (what Triton needs), children (processes that
end with their parent), signals (Ctrl-C and SIGTERM), rendezvous (processes meet), distributed (devices, ranks, seeds),
watch (ends a rank whose peers are silent), random_state (generators as plain values), progress (bars).
"""
