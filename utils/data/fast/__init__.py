"""--worker-tensor, and the last steps of a sample left to the GPU. Opt-in: a run without flags imports nothing of it.

Read in this order; loader.py chooses among them and torch's loader by the flags:

    worker_pool     processes that answer tasks; one message and nothing left behind, whatever happens to them
    shm_batches     workers write their samples into batches in shared memory, which the loader yields as they are
    deferred        a data set whose samples carry their last steps instead of making them
    device_augment  those steps for a whole batch, on the GPU (device_augment_triton) or the host

The same batches as the reference, whatever the flags: tests/data/fast/test_loader.py; the same bytes from deferred
steps: test_deferred.py and test_device_augment.py.
"""
