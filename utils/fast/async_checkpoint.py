"""Checkpoints written beside the training: a snapshot at once, the files by a thread."""

import logging
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from utils.engine.checkpoint import Checkpoints
from utils.engine.checkpoint_reader import Checkpoint, stored_model
from utils.engine.ema import copy_with, empty_half_copy
from utils.system.distributed import unwrap
from utils.system.files import cause_of, printable
from utils.system.signals import held_back

logger = logging.getLogger(__name__)


class BackgroundCheckpoints(Checkpoints):
    """Checkpoints whose files one thread writes, in order, each to a temporary name first.

    The content is copied to host memory before `after_epoch` returns, so that training may go on; no more than one
    snapshot is kept. When a file could not be written, a warning says so at once, and the next save, or whoever asks
    for the files, gets the OSError. The interpreter does not exit before everything is written.
    """

    def __init__(self, folder, epochs, save_every_epoch=True, period=0):
        super().__init__(folder, epochs, save_every_epoch, period)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoints")
        self._pending, self._newest = None, ((), {})  # the files written last, and their content
        self.copies = HostCopies()

    def initial(self, model):
        self._begin(on_host(unwrap(model)), [self.folder / "init.pt"])

    def after_epoch(self, make_content, epoch, is_best):
        self.wait()
        self.copies.wanted = []  # of an attempt that had too little memory
        super().after_epoch(make_content, epoch, is_best)

    def write(self, content, paths):
        self.copies.fetch()
        self._begin(snapshot(content, self.copies.owned()), paths)

    def _begin(self, content, paths):
        with held_back():  # or a thread could have begun that Python has no note of, and waits for when it ends
            self._pending, self._newest = self._writer.submit(self._write_all, content, paths), (paths, content)

    def _write_all(self, content, paths):
        try:
            self.copies.fill()
            super().write(content, paths)
        except Exception as error:  # raised again by `wait`
            logger.warning("%s could not be written: %s", " or ".join(map(printable, paths)), cause_of(error))
            raise

    def wait(self):
        """Return when all files are written; raises the error of the last ones, if there was one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def written(self):
        self.wait()
        return super().written()

    def strip(self, rebuild):
        super().strip(rebuild)
        self._newest = (), {}

    def inference_model(self, checkpoint, rebuild):
        """That of a checkpoint in memory is there already; to build another takes a tenth of a second."""
        if checkpoint.path not in self._newest[0]:
            return super().inference_model(checkpoint, rebuild)
        model = self._newest[1]["ema"]
        model.yaml_file = None  # as of one that is built of the yaml in a checkpoint
        return model

    def are_same(self):
        return {self.last, self.best} <= {*self._newest[0]} or super().are_same()

    def read(self, path):
        """As the reader returns it, but from memory if it is there: reading is the slowest part of a run's end."""
        paths, content = self._newest
        if path not in paths:
            return super().read(path)
        values = {key: content[key] for key in ("epoch", "best_fitness", "optimizer")}
        return Checkpoint(path, ema=stored_model(content["ema"]), **values)


class HostCopies:
    """As NewCopies, but in host memory that every checkpoint uses again, and filled in two steps.

    `fetch` copies from the device, storage by storage: nearly everything lies in a few flat tensors, so there are few
    copies. `fill` needs no device and runs in the thread: it writes each copy, whose content is undefined until then.
    """

    def __init__(self):
        self.models, self.kept = {}, {}  # the copies: {id of the model: model}, {key: tensor}
        self.wanted = []  # (source, copy)
        self.taken = {}  # {address of a storage of the sources: its bytes on the host}

    def owned(self):
        """The ids of all copies that are in use."""
        return set(map(id, (*self.models.values(), *self.kept.values())))

    def half_model(self, model):
        model = unwrap(model)
        if id(model) not in self.models:
            copy = empty_half_copy(model, "cpu", torch.contiguous_format)
            self.models[id(model)] = _attributes_on_host(copy)
        copy = self.models[id(model)]
        for name, value in vars(model).items():  # names, hyp and the like may have changed since
            if not name.startswith("_"):
                setattr(copy, name, snapshot(value))
        for parts in ("parameters", "buffers"):
            self.wanted += zip(getattr(model, parts)(), getattr(copy, parts)(), strict=True)
        return copy

    def state(self, model):
        state = unwrap(model).state_dict()
        return {name: self._copy((id(model), name), value) for name, value in state.items()}

    def values(self, state, key=()):
        if isinstance(state, torch.Tensor):
            return self._copy(key, state)
        if isinstance(state, dict):
            return {name: self.values(value, (*key, name)) for name, value in state.items()}
        return state

    def _copy(self, key, source):
        copy = self.kept.get(key)
        if copy is None or (copy.shape, copy.dtype, copy.stride()) != (source.shape, source.dtype, source.stride()):
            copy = self.kept[key] = torch.empty_like(source, device="cpu")
        self.wanted.append((source, copy))
        return copy

    @torch.no_grad()
    def fetch(self):
        """Copy all that is wanted to the host; the sources may change afterwards."""
        before, self.taken = self.taken, {}
        storages = {_storage_address(source): source.untyped_storage() for source, _ in self.wanted}
        for address, storage in storages.items():
            there = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            here = before.get(address)
            if here is None or len(here) != len(there):
                here = torch.empty(len(there), dtype=torch.uint8, pin_memory=there.is_cuda)
            self.taken[address] = here.copy_(there, non_blocking=True)
        if any(storage.is_cuda for storage in storages.values()):
            torch.cuda.current_stream().synchronize()

    @torch.no_grad()
    def fill(self):
        """Write what `fetch` has brought into the copies."""
        for source, copy in self.wanted:
            whole = self.taken[_storage_address(source)].untyped_storage()
            part = torch.empty(0, dtype=source.dtype)
            copy.copy_(part.set_(whole, source.storage_offset(), source.shape, source.stride()))
        self.wanted = []


def on_host(model):
    """A copy of `model` as `in_stock_order(model)`, in host memory."""
    copies, tensors = {}, [*model.parameters(), *model.buffers()]
    for dtype in {tensor.dtype for tensor in tensors}:
        of_type = [tensor for tensor in tensors if tensor.dtype == dtype]
        together = torch.cat([tensor.detach().flatten() for tensor in of_type]).cpu()  # one copy instead of hundreds
        parts = together.split([tensor.numel() for tensor in of_type])
        copies |= {id(tensor): part.clone().view(tensor.shape) for tensor, part in zip(of_type, parts, strict=True)}
    return _attributes_on_host(copy_with(copies, model))


def _attributes_on_host(model):
    """`model`, whose tensors that are neither parameters nor buffers, such as class weights, lie in host memory now."""
    for layer in model.modules():
        attributes = {name: value for name, value in vars(layer).items() if isinstance(value, torch.Tensor)}
        for name, value in attributes.items():
            setattr(layer, name, value.cpu())
    return model


def _storage_address(tensor):
    """The address of the storage of a tensor: the same for all tensors that lie in it."""
    return tensor.untyped_storage().data_ptr()


def snapshot(content, owned=()):
    """A copy of `content`, nested dicts and lists, that shares no tensor with it and lies in host memory.

    Modules are moved instead of copied: a checkpoint is made of copies of the models already. So the thread never calls
    the device, which may be recording a CUDA graph. What has its id in `owned` is such a copy in host memory already.
    """
    if id(content) in owned:
        return content
    if isinstance(content, torch.Tensor):
        return content.detach().to("cpu", copy=True)
    if isinstance(content, nn.Module):
        return _attributes_on_host(content).cpu()
    if isinstance(content, dict):
        return {key: snapshot(value, owned) for key, value in content.items()}
    if isinstance(content, list | tuple):
        copies = [snapshot(value, owned) for value in content]
        return type(content)(*copies) if hasattr(content, "_fields") else type(content)(copies)
    return content
