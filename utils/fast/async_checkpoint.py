"""Checkpoints written beside the training: a snapshot at once, the files by a thread."""

import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from utils.engine.checkpoint import Checkpoints
from utils.system.files import cause_of, printable

logger = logging.getLogger(__name__)


class BackgroundCheckpoints(Checkpoints):
    """Checkpoints whose files one thread writes, in order, each to a temporary name first.

    The content is copied to host memory before `after_epoch` returns, so that training may go on; no more than one
    snapshot is kept. A file that could not be written is warned about at once, and raised as OSError at the next
    save, or when the files are wanted. The interpreter does not exit before everything is written.
    """

    def __init__(self, folder, epochs, save_every_epoch=True, period=0):
        super().__init__(folder, epochs, save_every_epoch, period)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending = None

    def after_epoch(self, make_content, epoch, is_best):
        self.wait()
        super().after_epoch(make_content, epoch, is_best)

    def write(self, content, paths):
        self._pending = self._writer.submit(self._write_all, snapshot(content), paths)

    def _write_all(self, content, paths):
        try:
            super().write(content, paths)
        except Exception as error:  # raised again by `wait`
            logger.warning("%s could not be written: %s", " or ".join(map(printable, paths)), cause_of(error))
            raise

    def wait(self):
        """Return when all files are written; raises what went wrong with the last ones."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def written(self):
        self.wait()
        return super().written()


def snapshot(content):
    """A copy of `content`, nested dicts and lists, that shares no tensor with it and lies in host memory.

    Modules are moved instead of copied: whoever makes a checkpoint puts copies of the models into it. The thread then
    never calls the device, which may be recording a CUDA graph.
    """
    if isinstance(content, torch.Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, nn.Module):
        for layer in content.modules():  # class_weights and the like, which are neither parameters nor buffers
            attributes = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
            for name, value in attributes.items():
                setattr(layer, name, value.cpu())
        return content.cpu()
    if isinstance(content, dict):
        return {key: snapshot(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        copies = [snapshot(value) for value in content]
        return type(content)(*copies) if hasattr(content, "_fields") else type(content)(copies)
    return content
