"""Training and evaluation as stock does them: the readable reference. Its opt-in twins are in utils/fast.

Read in this order: trainer (state of a run, one step), optimizer, ema, batches (from the loader to the model),
evaluate (a whole data set scored), checkpoint_reader and checkpoint (files in and out), resume (what a checkpoint adds
to stock's layout), autoanchor, early_stopping, overfit.
"""
