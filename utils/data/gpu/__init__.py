"""--cache-images gpu: the images live beside the model. Opt-in: a run without flags imports nothing of it.

placing       where they fit: card, page-locked memory, RAM; one sentence says why
host_memory   one copy for all processes of a machine, that GPUs can read
filling       decodes files straight to where the images stay; processes share the work
store         what a kernel reads: bytes, offsets and shapes
recipes       a data set whose workers only draw random numbers and write what a kernel needs to make the image
targets       the labels of the samples of a micro-batch, all at once
compose       batches of such samples, made on the GPU (compose_triton); whether it makes the host's bytes
kept_batches  finished batches of a validation set; with --fast as well
"""
