"""Convolutions that are run ahead of the first step, while a thread goes through the layers."""

import subprocess
import sys
from threading import Event, Timer, current_thread, main_thread
from types import SimpleNamespace

import pytest
import torch

from models.common import Conv
from utils.fast import start
from utils.system.files import PROJECT_ROOT


@pytest.fixture(autouse=True)
def no_search(monkeypatch):
    """As in a short run; a training of an earlier test may have left cuDNN's search on."""
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


CPU = torch.device("cpu")


def watch_convolutions(monkeypatch):
    """The list of (operation, results, name of the thread) that will have been made beside the layers."""
    made, init = [], start._Handing.__init__

    def watched(mode, operations):
        def put(work):
            operations.put(lambda: made.append((work.func, work(), current_thread().name)))

        init(mode, SimpleNamespace(put=put))

    monkeypatch.setattr(start._Handing, "__init__", watched)
    return made


def found_beside(work):
    """What `work()` returns in the thread of the layers."""
    found = []
    start.with_convolutions_here(CPU, lambda: found.append(work()))
    return found[0]


def like(tensor):
    return tensor is not None and (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


@pytest.mark.parametrize(
    ("kernel", "stride", "pad", "reach", "groups", "bias", "mask"),
    [
        (3, 1, 1, 1, 1, True, (True, True, True)), (1, 1, 0, 1, 1, False, (False, True, False)),
        ((3, 5), (2, 1), (1, 2), 1, 2, False, (True, False, False)), (3, 2, 0, 2, 4, True, (True, True, False)),
    ],
)  # fmt: skip
def test_convolutions_are_run_here(kernel, stride, pad, reach, groups, bias, mask, monkeypatch):
    """What the thread gets at once has the form of what is made here, which is the right result."""
    made, aten, order = watch_convolutions(monkeypatch), torch.ops.aten, torch.channels_last
    conv = torch.nn.Conv2d(8, 12, kernel, stride, pad, reach, groups, bias).to(memory_format=order)
    x = torch.rand(2, 8, 17, 12).contiguous(memory_format=order)
    geometry = conv.stride, conv.padding, conv.dilation, False, (0, 0), groups

    def work():
        found = aten.convolution(x, conv.weight, conv.bias, *geometry)
        sizes = [12] if mask[2] else None
        return found, aten.convolution_backward(torch.ones_like(found), x, conv.weight, sizes, *geometry, mask)

    found, gradients = found_beside(work)
    (_, own, thread), (_, own_gradients, _) = made
    assert thread == main_thread().name
    assert torch.equal(own, conv(x)) and like(own) == like(found) and not own.requires_grad
    assert [like(gradient) for gradient in own_gradients] == [like(gradient) for gradient in gradients]
    assert [gradient is not None for gradient in gradients] == list(mask)


def test_handing_convolutions_over_needs_no_compiler():
    program = """
import sys, torch
from utils.fast import start
x = torch.rand(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
start.with_convolutions_here(torch.device("cpu"), lambda: torch.nn.Conv2d(4, 4, 3)(x).sum().backward())
print("torch._dynamo" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == "False\n", run.stderr


def test_only_maps_in_channels_last_order_are_handed_over(monkeypatch):
    made, conv = watch_convolutions(monkeypatch), torch.nn.Conv2d(4, 4, 3)
    turned, line = torch.nn.ConvTranspose2d(4, 4, 3), torch.nn.Conv1d(4, 4, 3)
    x, of_one = torch.rand(2, 4, 8, 8), torch.nn.Conv2d(1, 4, 3)  # maps of one channel have both orders
    last = x.contiguous(memory_format=torch.channels_last)
    cases = (conv, x), (turned, last), (line, x[:, :, 0]), (of_one, x[:, :1].contiguous())

    def work():
        found = [layer(maps) for layer, maps in cases]
        found[0].sum().backward()
        return found

    found = found_beside(work)
    assert not made and all(torch.equal(a, layer(maps)) for a, (layer, maps) in zip(found, cases, strict=True))
    assert [like(result) for result in found] == [like(layer(maps)) for layer, maps in cases]


def test_what_else_a_convolution_may_be_given(monkeypatch):
    """Weights in the usual order; one number for both axes."""
    made, weight = watch_convolutions(monkeypatch), torch.rand(4, 4, 3, 3, requires_grad=True)
    x = torch.rand(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)

    def work():
        found = torch.nn.functional.conv2d(x, weight, stride=[2], padding=[1], dilation=[1])
        return found, *torch.autograd.grad(found.sum(), weight)

    found, gradient = found_beside(work)
    assert like(found) == like(made[0][1]) and like(gradient) == like(made[1][1][1])


def test_after_an_error_the_rest_is_left_out(monkeypatch):
    made, conv, x = watch_convolutions(monkeypatch), torch.nn.Conv2d(4, 4, 3), torch.rand(2, 4, 8, 8)
    get, failed = start.SimpleQueue.get, Event()

    class Queue(start.SimpleQueue):
        def get(self, *args):
            if current_thread() is main_thread():
                failed.wait(5)  # the layers are ahead of the convolutions
            return get(self, *args)

    def work():
        for _ in range(3):
            conv(x.contiguous(memory_format=torch.channels_last))
        Timer(0.2, failed.set).start()
        raise InterruptedError

    monkeypatch.setattr(start, "SimpleQueue", Queue)
    with pytest.raises(InterruptedError):
        start.with_convolutions_here(CPU, work)
    assert not made


@pytest.mark.parametrize(
    "setting", ["", "start._enter = lambda *_: 1 / 0"], ids=["both take the rest", "before the first layer"]
)
def test_nobody_waits_after_an_error(setting):
    """The thread of the layers drops the rest while the other one takes it: neither may wait for what is not there."""
    program = f"""
import threading, time, torch
from utils.fast import start
failed = threading.Event()
class Queue(start.SimpleQueue):
    def get(self, *args):
        if threading.current_thread() is threading.main_thread():
            failed.wait(5)
        return super().get(*args)
    def empty(self):
        return self.then_taken(super().empty())
    def get_nowait(self):
        self.then_taken(None)
        return super().get_nowait()
    def then_taken(self, found):
        failed.set()
        time.sleep(0.2)
        return found
start.SimpleQueue = Queue
{setting}
x = torch.rand(1, 4, 8, 8).contiguous(memory_format=torch.channels_last)
def work():
    torch.nn.Conv2d(4, 4, 3)(x)
    1 / 0
try:
    start.with_convolutions_here(torch.device("cpu"), work)
except ZeroDivisionError:
    print("ended")
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60)
    assert run.stdout == "ended\n", run.stderr


def test_no_thread_outlives_an_interrupted_wait():
    """As after a second Ctrl-C: Python would abort if the thread were still at work at its end."""
    program = """
import signal, threading, time, torch
from utils.fast import start
def work():
    threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
    time.sleep(1)
try:
    start.with_convolutions_here(torch.device("cpu"), work)
except KeyboardInterrupt:
    print([thread.name for thread in threading.enumerate() if "layers" in thread.name])
"""
    run = subprocess.run([sys.executable, "-c", program], cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.returncode) == ("[]\n", 0), run.stderr


def test_a_search_is_not_disturbed(monkeypatch):
    made, conv = watch_convolutions(monkeypatch), torch.nn.Conv2d(4, 4, 3)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    x = torch.rand(2, 4, 8, 8).contiguous(memory_format=torch.channels_last)
    assert torch.equal(found_beside(lambda: conv(x)), conv(x)) and not made


def test_a_network_gets_gradients_of_the_right_form(monkeypatch):
    made, order = watch_convolutions(monkeypatch), torch.channels_last
    network = torch.nn.Sequential(Conv(3, 8), Conv(8, 8, 3, 2)).to(memory_format=order)
    found_beside(lambda: network(torch.rand(2, 3, 8, 8).contiguous(memory_format=order)).sum().backward())
    assert len(made) == 4 and all(like(p.grad)[:2] == like(p)[:2] for p in network.parameters())


def test_a_convolution_that_fails_is_for_the_first_step(monkeypatch):
    order, aten = torch.channels_last, torch.ops.aten
    x, weight = (torch.rand(*shape).contiguous(memory_format=order) for shape in ((2, 8, 9, 9), (12, 5, 3, 3)))
    found = found_beside(lambda: aten.convolution(x, weight, None, (1, 1), (1, 1), (1, 1), False, (0, 0), 1))
    assert found.shape == (2, 12, 9, 9)
