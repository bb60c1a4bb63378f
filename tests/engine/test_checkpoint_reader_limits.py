"""Files of allowed names only that stand for far more than they hold: refused in words, before they fill the memory."""

import logging
import multiprocessing
import random
import resource

import pytest
import torch

from models.experimental import attempt_load
from tests.engine.hostile_checkpoints import HOSTILE, ODD
from tests.engine.pickle_code import archive, dictionary, tensor
from tests.tiny_model import tiny_model
from utils.engine.checkpoint_reader import read_checkpoint

MEMORY = 3_000_000_000  # bytes that a reader may take beyond what it has
WATCHDOG = 120  # seconds until a reader counts as hung; the machine of the tests may be busy


def within_limits(function, *args):
    """What `function(*args)` returns, or the text of its ValueError, in a process that may take MEMORY more bytes."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_in_child, args=(sender, function, args))
    process.start()
    sender.close()
    try:
        assert receiver.poll(WATCHDOG), "the reader hangs"
        return receiver.recv()
    except EOFError:
        raise AssertionError("the reader died") from None
    finally:
        process.kill()
        process.join()


def _in_child(sender, function, args):
    with open("/proc/self/statm") as file:  # noqa: PTH123
        taken = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY, taken + MEMORY))
    torch.set_num_threads(1)
    logging.disable()
    try:
        sender.send(function(*args))
    except ValueError as error:
        sender.send(str(error))
    except BaseException as error:
        sender.send(error)


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(name, tmp_path):
    path = tmp_path / "hostile.pt"
    path.write_bytes(HOSTILE[name](random.Random(0)))
    said = within_limits(read_checkpoint, path)
    assert isinstance(said, str) and "hostile.pt" in said and "\n" not in said and len(said) < 600, said
    assert "memory" not in said.lower() or "any memory" in said, "it was tried, and failed by chance"


@pytest.mark.parametrize("name", ODD)
@pytest.mark.filterwarnings("ignore")
def test_odd_files_are_read_as_torch_reads_them(name, tmp_path):
    path = tmp_path / "odd.pt"
    path.write_bytes(ODD[name]())
    found, expected = read_checkpoint(path).model.state, torch.load(path, weights_only=True)["model"]
    assert list(found) == list(expected)
    for key, value in expected.items():
        assert type(found[key]) is torch.Tensor and not found[key].requires_grad
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        assert found[key].stride() == value.stride() or not value.numel()
        assert found[key].tolist() == value.tolist()


def test_views_of_one_storage_stay_views(tmp_path):
    """A storage that many tensors share is in the memory once."""
    whole = torch.arange(1000.0)
    torch.save({"model": {"whole": whole, "part": whole[10:20]}}, tmp_path / "a.pt")
    state = read_checkpoint(tmp_path / "a.pt").model.state
    assert state["part"].untyped_storage().data_ptr() == state["whole"].untyped_storage().data_ptr()


# ---- models that would be too large ---------------------------------------------------------------------------------


def wide(cfg):
    cfg["backbone"][0][3] = [100_000, 3, 1]


def heavy(cfg):
    cfg["backbone"][:2] = [[-1, 1, "Conv", [90_000, 1, 2]], [-1, 1, "Conv", [90_000, 1, 2]]]


def padded(cfg):
    cfg["backbone"][0][3] = [8, 3, 1, 30_000]


def enlarged(cfg):
    cfg["backbone"][0] = [-1, 1, "nn.Upsample", [None, 3000, "nearest"]]


def enlarged_to_a_size(cfg):
    cfg["backbone"][0] = [-1, 1, "nn.Upsample", [[90_000, 90_000], None, "nearest"]]


def pooled(cfg):
    cfg["backbone"][0] = [-1, 1, "nn.MaxPool2d", [10**9, 1, 5 * 10**8]]


def slow(cfg):
    cfg["backbone"][:2] = [[-1, 1, "Conv", [1000, 3, 2]], [-1, 1, "Conv", [1000, 9, 1]]]


def repeated(cfg):
    cfg["backbone"][1:1] = [[-1, 1000, "Conv", [8, 1, 1]]] * 200


def quadrupled(cfg):
    cfg["backbone"] = [[-1, 1, "ReOrg", []]] * 30
    cfg["head"][-1][0] = [-1, -1, -1]


def doubled(cfg):
    cfg["backbone"] = [[[-1, -1], 1, "Concat", [1]]] * 40
    cfg["head"][-1][0] = [-1, -1, -1]


def many_heads(cfg):
    cfg["head"][-1][2] = "MultiHeadDetect"
    cfg |= {"heads": 5000, "nc": 100_000}


def many_channels(cfg):
    cfg["ch"] = 100_000


def expanded(cfg):
    cfg["backbone"][0] = [-1, 1, "SPPCSPC", [64, False, 1, 1e9]]


def a_tensor(cfg):
    cfg["backbone"][0][3] = [torch.ones(8)]


LARGE = [wide, heavy, padded, enlarged, enlarged_to_a_size, pooled, slow, repeated, quadrupled, doubled, many_heads,
         many_channels, expanded, a_tensor]  # fmt: skip


@pytest.mark.parametrize("change", LARGE)
def test_a_small_file_of_a_model_that_fills_the_memory_is_refused(change, tmp_path):
    model = tiny_model()
    change(model.yaml)
    torch.save({"model": model}, tmp_path / "large.pt")
    said = within_limits(attempt_load, str(tmp_path / "large.pt"))
    assert isinstance(said, str) and "large.pt" in said and "allocate" not in said, said


def test_two_pickles_in_one_archive(tmp_path):
    (tmp_path / "a.pt").write_bytes(archive(dictionary(w=tensor([1], [1])), more=[("b/data.pkl", b"\x80\x02}.")]))
    with pytest.raises(ValueError, match="its archive holds 2 files called data.pkl, as if it had been unpacked"):
        read_checkpoint(tmp_path / "a.pt")
