"""The step as a CUDA graph against the reference; on a CPU with a stand-in that runs the captured work again."""

from contextlib import nullcontext

import pytest
import torch

from tests import step_cases
from tests.step_cases import assert_equal_runs, batches, new_trainer
from utils.fast import graph_step
from utils.fast.graph_step import GraphSteps
from utils.fast.train_step import FastSteps
from utils.loss import batched_assigner, candidates
from utils.ops import cuda_graph

ON_GPU = torch.device("cuda")


class Replayed:
    """A stand-in for a CUDA graph: does the work once more, and writes what it returns where it was at first."""

    def __init__(self, body):
        self.body, self.items = body, torch.zeros(4)

    def replay(self):
        items = self.body()
        if items is not None:  # of an update there is nothing to return
            self.items.copy_(items)


class OnCPU(GraphSteps):
    """GraphSteps without a GPU: capturing executes nothing, a replay runs the work on the static tensors."""

    def open_stream(self):
        pass

    def on_stream(self):
        return nullcontext()

    def wait(self):
        pass

    def record(self, body):
        graph = Replayed(body)
        return graph, graph.items


@pytest.fixture(autouse=True)
def crowds_are_rare(request, monkeypatch):
    """The random batches differ a lot in size; only the tests about crowds tell them apart."""
    if "crowded" not in request.node.name:
        monkeypatch.setattr(cuda_graph, "CROWDED_RATIO", 1000.0)


def compare(kind, num_steps=24, sizes=(step_cases.BATCH,), interval=4, **options):
    expected = step_cases.run(new_trainer(batched=True, **options), batches(num_steps, sizes=sizes, as_bytes=False), 2)
    steps = kind(new_trainer(batched=True, **options), interval)
    found = step_cases.run(steps, batches(num_steps, sizes=sizes), 2)
    assert_equal_runs(found, expected, rtol=2e-4, atol=2e-5)
    return steps


@pytest.mark.parametrize("use_ota", [True, False], ids=["ota", "plain"])
def test_equals_the_reference_over_warm_up_and_accumulation(use_ota):
    """24 steps, of which 12 are warm-up; accumulation grows from 1 to 4 batches."""
    steps = compare(OnCPU, use_ota=use_ota)
    assert steps.counts["replayed"] > 15 and steps.counts["ordinary"] == 3
    assert steps.counts["replayed"] + steps.counts["ordinary"] == 24


def test_each_image_shape_has_its_graphs():
    steps = compare(OnCPU, sizes=(4, 4, 2), num_steps=30)
    assert {shape[0] for shape in steps.shapes} == {4, 2}
    assert steps.counts["ordinary"] == 6 and steps.counts["captured"] >= 4


def test_too_many_shapes_are_trained_without_a_graph(monkeypatch):
    monkeypatch.setattr(graph_step, "MAX_KEYS", 1)
    steps = compare(OnCPU, sizes=(4, 2), num_steps=12)
    assert len(steps.shapes) == 1 and steps.counts["ordinary"] == 3 + 6


def test_padded_sizes_grow_with_the_batches(monkeypatch):
    monkeypatch.setattr(candidates, "SPARE", 1.0)
    steps = compare(OnCPU)
    (shape,) = steps.shapes.values()
    assert steps.counts["captured"] > 2
    length = len(candidates._empty_buffer(shape.padded.sizes[0], pinned=False))
    assert len(shape.captured.inputs[1]) == length


def crowded_steps(*crowded):
    """The steps of six ordinary batches and then of those that are told: with 40 times the boxes, or ordinary."""
    steps, given = OnCPU(new_trainer(batched=True)), list(batches(6))
    steps.begin_epoch()
    crowd = given[0]._replace(targets=given[0].targets.repeat(40, 1))
    for i, batch in enumerate([*given, *(crowd if is_crowded else given[0] for is_crowded in crowded)]):
        steps.step(i, 0, batch)
    return steps


def test_crowded_batches_go_without():
    steps = crowded_steps(True, False)
    assert steps.counts["ordinary"] == 4 and steps.counts["replayed"] == 4


def test_many_crowded_batches_enlarge_the_graph(monkeypatch):
    monkeypatch.setattr(cuda_graph, "MAX_CROWDED", 1)
    steps = crowded_steps(True, True, True)
    assert steps.counts["ordinary"] == 4 and steps.counts["replayed"] == 5


def test_more_pairs_than_a_graph_can_take(monkeypatch):
    monkeypatch.setattr(batched_assigner, "MAX_PAIRS", 1)
    steps = OnCPU(new_trainer(batched=True))
    steps.begin_epoch()
    for i, batch in enumerate(batches(5)):
        steps.step(i, 0, batch)
    assert steps.counts == {"replayed": 0, "captured": 1, "ordinary": 5}, "only the update, which has no pairs"


def test_a_failed_capture_is_a_warning(caplog):
    class Broken(OnCPU):
        def record(self, body):
            raise RuntimeError("operation not permitted\nmore text")

    steps = compare(Broken, num_steps=10)
    assert steps.counts == {"replayed": 0, "captured": 0, "ordinary": 10}
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len([text for text in warnings if "cannot be captured (operation not permitted)" in text]) == 1


class Tight(OnCPU):
    """Has no memory for the work on `size` images beside what graphs hold."""

    size, num_failed = 2, 0

    def forward_backward(self, images, compute_loss):
        if len(images) == self.size and (self.captured_update or any(s.captured for s in self.shapes.values())):
            self.num_failed += 1
            for parameter in self.trainer.model.parameters():  # what a pass leaves that comes half the way
                parameter.grad = torch.ones_like(parameter)
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return super().forward_backward(images, compute_loss)


def test_an_ordinary_step_takes_the_memory_of_the_graphs(caplog):
    """The last batch of an epoch is smaller and has no graph yet."""
    caplog.set_level("INFO")
    steps = compare(Tight, num_steps=12, sizes=(4, 4, 4, 4, 2))
    assert steps.num_failed == 2 and steps.counts == {"replayed": 7, "captured": 5, "ordinary": 5}
    assert caplog.text.count("given their memory back") == 2


def test_work_between_the_steps_takes_the_memory_of_the_graphs(caplog):
    caplog.set_level("INFO")
    steps = OnCPU(new_trainer(batched=True))
    step_cases.run(steps, batches(6))
    calls = []

    def validate(title, is_last=False):
        calls.append((title, is_last))
        if steps.captured_update or any(shape.captured for shape in steps.shapes.values()):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "scores"

    assert steps.with_room(validate)("val", is_last=True) == "scores"
    assert calls == [("val", True)] * 2 and caplog.text.count("given their memory back") == 1
    step_cases.run(steps, batches(2))
    assert steps.counts["captured"] == 4, "captured again"
    steps.finish()
    assert steps.with_room(validate)("val") == "scores" and len(calls) == 3, "nothing is held after the last step"

    def fail():
        raise RuntimeError("shapes do not fit")

    with pytest.raises(RuntimeError, match="shapes"):
        steps.with_room(fail)()


def test_without_graphs_the_memory_is_too_small(monkeypatch):
    class Full(OnCPU):
        def forward_backward(self, images, compute_loss):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    steps = Full(new_trainer(batched=True))
    steps.begin_epoch()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        steps.step(0, 0, next(iter(batches(1))))


def test_another_loss_and_moved_weights_need_new_graphs():
    steps = OnCPU(new_trainer(batched=True))
    step_cases.run(steps, batches(6))
    assert steps.counts["captured"] == 2
    steps.begin_epoch()
    assert len(steps.shapes) == 1
    steps.trainer.model.half().float()
    steps.begin_epoch()
    assert not steps.shapes
    step_cases.run(steps, batches(6))
    other = new_trainer(batched=True, use_ota=False).compute_loss
    steps.trainer.compute_loss = other
    steps.begin_epoch()
    assert not steps.shapes and steps.loss is other


def test_another_optimizer_is_not_captured(caplog):
    steps = OnCPU(new_trainer(batched=True, adam=True))
    step_cases.run(steps, batches(5))
    assert steps.counts["ordinary"] == 5 and "the optimiser is not SGD" in caplog.text


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.fixture
def exact_convolutions():
    before = torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32 = before


def gpu_runs(kind, num_steps=36, scale=None, **options):
    """(Run of `kind`, Run of the reference, what made the steps of the first)."""
    trainers = [new_trainer(ON_GPU, batched=batched, **options) for batched in (True, False)]
    for trainer in trainers if scale else ():
        trainer.scaler.load_state_dict(trainer.scaler.state_dict() | {"scale": scale})
    steps = kind(trainers[0], 4)
    given = (batch._replace(targets=batch.targets.cpu()) for batch in batches(num_steps, ON_GPU))
    found = step_cases.run(steps, given, 2)
    expected = step_cases.run(trainers[1], batches(num_steps, ON_GPU, as_bytes=False), 2)
    return found, expected, steps


@pytest.mark.gpu
@pytest.mark.parametrize("use_ota", [True, False], ids=["ota", "plain"])
@pytest.mark.parametrize("kind", [FastSteps, GraphSteps])
def test_on_a_gpu_in_full_precision(kind, use_ota, exact_convolutions):
    found, expected, steps = gpu_runs(kind, precision="off", use_ota=use_ota)
    assert_equal_runs(found, expected, rtol=2e-2, atol=2e-3)
    torch.testing.assert_close(found.items[:6], expected.items[:6], rtol=1e-4, atol=1e-5)
    if kind is GraphSteps:
        assert steps.counts["replayed"] == 33 and steps.counts["ordinary"] == 3


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [FastSteps, GraphSteps])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_on_a_gpu_in_mixed_precision(kind, precision):
    found, expected, _ = gpu_runs(kind, precision=precision)
    torch.testing.assert_close(found.items[:8], expected.items[:8], rtol=0.05, atol=0.02)
    torch.testing.assert_close(found.items.mean(0), expected.items.mean(0), rtol=0.1, atol=0.02)
    assert found.trainer.scaler.state_dict() == expected.trainer.scaler.state_dict()
    for name, value in expected.state().items():
        if "num_batches_tracked" in name:
            assert found.state()[name].equal(value), name


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [FastSteps, GraphSteps])
def test_overflows_from_the_first_step_on_are_skipped(kind):
    """A scale of 2^36 overflows for some steps: no weight moves, momentum stays 0, the scale is halved each time."""
    found, expected, _ = gpu_runs(kind, scale=2.0**36, total_batch=64)
    mine, theirs = (r.trainer.scaler.state_dict() for r in (found, expected))
    assert mine["scale"] < 2.0**34 and abs(mine["scale"] / theirs["scale"]) in (0.5, 1, 2)
    assert all(value.isfinite().all() for value in found.state().values())
    torch.testing.assert_close(found.items, expected.items, rtol=0.15, atol=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [FastSteps, GraphSteps])
def test_no_step_waits_for_the_gpu(kind):
    steps = kind(new_trainer(ON_GPU, batched=True), 4)
    given = list(batches(16, ON_GPU))
    given = [batch._replace(targets=batch.targets.cpu()) for batch in given]
    steps.begin_epoch()
    for i in range(12):
        steps.step(i, 0, given[i])
    if kind is GraphSteps:  # room for all that comes
        steps.step(40, 0, max(given, key=lambda batch: len(batch.targets)))
    try:
        torch.cuda.set_sync_debug_mode("error")
        for i in range(12, 15):
            steps.step(i, 0, given[i])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(steps.late_items()) > 0


@pytest.mark.gpu
def test_capturing_again_does_not_pile_up_memory():
    steps = GraphSteps(new_trainer(ON_GPU, batched=True), 4)
    given = [batch._replace(targets=batch.targets.cpu()) for batch in batches(12, ON_GPU)]
    used = []
    for _ in range(4):
        steps.begin_epoch()
        steps.shapes.clear()
        for i, batch in enumerate(given):
            steps.step(i, 0, batch)
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_reserved())
    assert used[3] <= used[1] * 1.1, used
