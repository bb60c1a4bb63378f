"""Epochs of at most N batches (--max-iter), which together still run through the whole data set."""

from itertools import chain, islice, repeat


class ShortEpochs:
    """A batch sampler over another one: each pass takes up to `max_batches` more of its endlessly repeated batches.

    `first_epoch` passes are taken as past, so that a resumed run goes on in the middle of the data set.
    """

    def __init__(self, batches, max_batches, first_epoch=0):
        self.batches, self.max_batches, self.first_epoch = batches, max_batches, first_epoch
        self.sampler, self.stream = batches.sampler, None

    def __len__(self):
        return min(len(self.batches), self.max_batches)

    def __iter__(self):
        if self.stream is None:
            self.stream = self._from(self.first_epoch * len(self))
        return islice(self.stream, len(self))

    def _from(self, num_past):
        passes, position = divmod(num_past, len(self.batches))
        if hasattr(self.sampler, "epoch"):  # it counts its passes, this one of whole data sets
            self.sampler.epoch = passes
        return islice(chain.from_iterable(repeat(self.batches)), position, None)
