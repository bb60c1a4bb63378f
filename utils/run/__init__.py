"""The wiring of one run. The only package that sees all options; train.py and test.py call it.

Read in this order: entry (start and end of the process), folder (the run folder, --resume), context (Run: what a run
is given), loaders (what it reads), fast_paths (which implementation fills each seam, and why), auto_batch
(--batch-size -1), evolve (--evolve).
"""
