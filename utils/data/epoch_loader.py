"""Loaders of torch, each pass of which is one epoch; their workers may read the next one meanwhile."""

import numpy as np
from torch.utils.data import DataLoader, Dataset, get_worker_info

from utils.data.sampler import EndlessBatches
from utils.data.worker_errors import LoaderError, about, describe
from utils.system.files import printable
from utils.system.memory import shared_array


class InfiniteDataLoader(DataLoader):
    """A DataLoader whose workers start once, at construction, and prefetch across the end of an epoch.

    Each pass yields one epoch; a pass that is left early is continued by the next one.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        # DataLoader forbids to replace its batch sampler in the ordinary way.
        object.__setattr__(self, "batch_sampler", EndlessBatches(self.batch_sampler))
        self.batches = super().__iter__()

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.batches)


class EpochLoader:
    """The batches of a torch DataLoader over a KeyedDataset; what goes wrong in it is a LoaderError.

    `batches` is a batch sampler over keys, `in_work()` names the images that the workers were at. `endless`: the
    workers prefetch across the ends of epochs; otherwise each pass begins with the indices published before it.
    """

    def __init__(self, source, batches, endless, batch_size, in_work, **options):
        self.source, self.dataset, self.sampler, self.batch_size = source, source.dataset, batches.sampler, batch_size
        self.num_workers, self.in_work = options["num_workers"], in_work
        self.loader = (InfiniteDataLoader if endless else DataLoader)(batch_sampler=batches, **options)

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        self.source.publish_indices()
        batches = iter(self.loader)
        for _ in range(len(self)):
            try:
                batch = next(batches)
            except Exception as error:
                text = _last_line(error)
                died = text.startswith("DataLoader ")  # killed or silent: torch knows its process only
                raise LoaderError(f"{text} Its workers were at {self.in_work()}" if died else text) from error
            yield batch


class NamedErrors(Dataset):
    """Samples of a KeyedDataset; an error names the file of the sample, and `in_work` what the workers were at."""

    def __init__(self, source, num_workers):
        self.source = source
        self.keys = shared_array((num_workers, 2), np.int64)
        self.keys[:] = -1

    def __len__(self):
        return len(self.source)

    def __getitem__(self, key):
        worker = get_worker_info()
        if worker:
            self.keys[worker.id] = key
        try:
            return self.source[key]
        except Exception as error:  # whatever it is, it belongs to this sample
            raise LoaderError(about(self.source.path(key), describe(error))) from error

    def in_work(self):
        """The images that the workers read last; one of them may have been too much for its worker."""
        return ", ".join(printable(self.source.path(key)) for key in self.keys.tolist() if key[0] >= 0)


def _last_line(error):
    """What torch's loader wants to say: it puts the traceback of a worker in front."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1].removeprefix(f"{LoaderError.__module__}.{LoaderError.__name__}: ")
