"""What ab_compare, run_trials, approve and smoke share: trainings in processes of their own, and what they left behind.

Read in this order: command_line (words of train.py), runner (a run process from start to end, and several at once),
devices (--devices, progress), markdown (tables), overrides (what a trial changes), trials (the table of run_trials),
optuna_sampler (where --sampler tpe gets its trials from), shared_search (the same for several machines).
"""
