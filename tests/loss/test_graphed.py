"""The loss replayed from a CUDA graph; on a CPU with a stand-in that does the captured work again."""

import pytest
import torch

from tests.loss_cases import random_case
from utils.loss import graphed
from utils.loss.batched import BatchedLoss, BatchedLossAuxOTA, BatchedLossOTA
from utils.loss.criterion import ComputeLossAuxOTA, ComputeLossOTA
from utils.loss.graphed import LossGraphs
from utils.ops import cuda_graph
from utils.ops.cuda_graph import WARM_UP_CALLS

KINDS = [BatchedLoss, BatchedLossOTA, BatchedLossAuxOTA]


class Replayed:
    """A stand-in for a CUDA graph: does the work once more, and writes what it returns where it was at first."""

    def __init__(self, body):
        self.body, self.result = body, body()
        self.replay()

    def replay(self):
        for mine, new in zip(self.result, self.body(), strict=True):
            for old, tensor in zip(mine, new, strict=True):
                old.copy_(tensor)


class OnCPU(LossGraphs):
    """LossGraphs without a GPU."""

    @staticmethod
    def can_capture(device):
        return True

    def record(self, body):
        graph = Replayed(body)
        return graph, graph.result

    def wait(self):
        pass


def new_loss(kind, case, graphs=OnCPU):
    compute_loss = kind(case.model)
    compute_loss.graphs = graphs(compute_loss.loss_and_gradients)
    return compute_loss


def other_values(case, seed):
    """The same batch with other predictions, the boxes in another order and one fewer for every seed."""
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randn(p.shape, generator=generator).to(p.device, p.dtype) for p in case.predictions)
    return [draw.requires_grad_() for draw in draws], case.targets.cpu().roll(seed, 0)[seed:]


def forward(compute_loss, case, predictions, targets):
    """As the loss is called on a GPU, with its graphs."""
    if case.images.device.type == "cuda":
        return compute_loss(predictions, targets, case.images)
    graph = compute_loss.graphs.find(predictions, compute_loss._settings())
    shapes = [prediction.shape for prediction in predictions[: case.num_layers]]
    candidate_sets = compute_loss.prepare(targets, shapes, case.size, at_least=graph and graph.padded.sizes)
    return compute_loss.compute(predictions, candidate_sets, graph)


def gradients(loss, predictions):
    return [g for g in torch.autograd.grad(loss, predictions, allow_unused=True) if g is not None]


def without_graph(kind, case, predictions, targets):
    loss, items = kind(case.model).compute(predictions, prepared(kind, case, targets))
    return loss, items, *gradients(loss, predictions)


def prepared(kind, case, targets):
    shapes = [prediction.shape for prediction in case.predictions[: case.num_layers]]
    candidate_sets = kind(case.model).prepare(targets, shapes, case.size)
    return [candidates.to(case.images.device) for candidates in candidate_sets]


def check_steps(kind, device, precision=None, num_steps=8):
    """Forward passes one after the other, and only then their backward passes, in turns with another loss."""
    cases = [random_case(seed, "ordinary", device, auxiliary=True) for seed in (3, 4)]
    losses = [new_loss(kind, case, OnCPU if device == "cpu" else LossGraphs) for case in cases]
    done = []
    with torch.autocast(device, precision, enabled=precision is not None):
        for step in range(num_steps):
            for compute_loss, case in zip(losses, cases, strict=True):
                values = other_values(case, step % 3)
                done.append((case, values, forward(compute_loss, case, *values)))
        for case, (predictions, targets), (loss, items) in done:
            found = loss, items, *gradients(loss, predictions)
            for mine, wanted in zip(found, without_graph(kind, case, predictions, targets), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5 * wanted.float().abs().max().item())
    return losses


@pytest.mark.parametrize("kind", KINDS)
def test_replays_equal_the_loss_without_a_graph(kind):
    for compute_loss in check_steps(kind, "cpu"):
        assert compute_loss.graphs.counts == {"replayed": 5, "captured": 1, "ordinary": 3}


def captured_loss(case, kind=BatchedLossOTA, graphs=OnCPU):
    """A loss that has captured its graph for `case`."""
    compute_loss = new_loss(kind, case, graphs)
    for _ in range(WARM_UP_CALLS + 1):
        forward(compute_loss, case, case.predictions, case.targets)
    return compute_loss


def test_shapes_precision_and_settings_have_graphs_of_their_own(monkeypatch):
    monkeypatch.setattr(graphed, "MAX_KEYS", 3)
    case = random_case(3, "ordinary")
    compute_loss = captured_loss(case)
    assert compute_loss.graphs.counts["captured"] == 1
    compute_loss.hyp["box"] *= 2
    expected = without_graph(BatchedLossOTA, case, case.predictions, case.targets)
    for _ in range(WARM_UP_CALLS + 1):
        found = forward(compute_loss, case, case.predictions, case.targets)
    torch.testing.assert_close(found[1], expected[1])
    assert compute_loss.graphs.counts["captured"] == 2
    halves = [[p.detach().to(dtype) for p in case.predictions] for dtype in (torch.bfloat16, torch.float16)]
    assert compute_loss.graphs.find(halves[0], compute_loss._settings()) is not None
    assert compute_loss.graphs.find(halves[1], compute_loss._settings()) is None  # that would be a fourth


def test_a_larger_batch_is_captured_again_and_a_crowded_one_is_not(monkeypatch):
    case = random_case(3, "ordinary")
    compute_loss = captured_loss(case)
    crowd = case.targets.repeat(8, 1)
    for _ in range(2):
        forward(compute_loss, case, case.predictions, crowd)
    assert compute_loss.graphs.counts == {"replayed": 1, "captured": 1, "ordinary": 5}
    monkeypatch.setattr(cuda_graph, "CROWDED_RATIO", 1000.0)
    for _ in range(2):
        found = forward(compute_loss, case, case.predictions, crowd)
    assert compute_loss.graphs.counts == {"replayed": 2, "captured": 2, "ordinary": 6}
    torch.testing.assert_close(found[1], without_graph(BatchedLossOTA, case, case.predictions, crowd)[1])


def test_more_pairs_than_a_graph_keeps(monkeypatch):
    monkeypatch.setattr(graphed, "MAX_PAIRS", 1)
    assert captured_loss(random_case(3, "ordinary")).graphs.counts == {"replayed": 0, "captured": 0, "ordinary": 4}


def test_a_failed_capture_is_one_warning(caplog):
    class Broken(OnCPU):
        def record(self, body):
            raise RuntimeError("operation not permitted\nmore text")

    case = random_case(3, "ordinary")
    compute_loss = captured_loss(case, graphs=Broken)
    found = forward(compute_loss, case, case.predictions, case.targets)
    torch.testing.assert_close(found[1], without_graph(BatchedLossOTA, case, case.predictions, case.targets)[1])
    assert compute_loss.graphs.find(case.predictions, ()) is None
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "cannot be captured (operation not permitted)" in record.getMessage()


def test_on_a_cpu_there_is_no_graph():
    case = random_case(0, "ordinary")
    assert LossGraphs(None).find(case.predictions, ()) is None


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("precision", [None, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_replays_on_cuda(kind, precision):
    for compute_loss in check_steps(kind, "cuda", precision):
        assert compute_loss.graphs.counts == {"replayed": 5, "captured": 1, "ordinary": 3}


@pytest.mark.gpu
@pytest.mark.parametrize("kind, reference", [(BatchedLossOTA, ComputeLossOTA), (BatchedLossAuxOTA, ComputeLossAuxOTA)])
def test_replays_equal_the_reference_on_cuda(kind, reference):
    case = random_case(3, "ordinary", "cuda", auxiliary=True)
    compute_loss = captured_loss(case, kind, LossGraphs)
    predictions, targets = other_values(case, 1)
    loss, items = forward(compute_loss, case, predictions, targets)
    assert compute_loss.graphs.counts["replayed"] == 2
    expected = reference(case.model)(predictions, targets.cuda(), case.images)
    torch.testing.assert_close((loss, items), expected, rtol=1e-5, atol=1e-6)
    for found, wanted in zip(gradients(loss, predictions), gradients(expected[0], predictions), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_no_replay_waits_for_the_gpu(kind):
    case = random_case(3, "ordinary", "cuda", auxiliary=True)
    compute_loss = captured_loss(case, kind, LossGraphs)
    values = [other_values(case, seed) for seed in range(3)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for predictions, targets in values:
            compute_loss(predictions, targets, case.images)[0].backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert compute_loss.graphs.counts["replayed"] == 4


@pytest.mark.gpu
def test_capturing_again_does_not_pile_up_memory():
    case = random_case(3, "ordinary", "cuda")
    compute_loss, used = new_loss(BatchedLossOTA, case, LossGraphs), []
    for _ in range(5):
        compute_loss.graphs.by_key.clear()
        for _ in range(WARM_UP_CALLS + 2):
            forward(compute_loss, case, case.predictions, case.targets.cpu())
        torch.cuda.synchronize()
        used.append(torch.cuda.memory_reserved())
    assert compute_loss.graphs.counts["captured"] == 5 and used[-1] <= used[1] * 1.1, used


@pytest.mark.gpu
def test_within_another_graph_there_is_none():
    case = random_case(3, "ordinary", "cuda")
    compute_loss = captured_loss(case, graphs=LossGraphs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert compute_loss.graphs.find(case.predictions, compute_loss._settings()) is None
        torch.zeros(1, device="cuda")  # an empty graph is a warning


@pytest.mark.gpu
def test_after_a_failed_capture_on_cuda_all_goes_on():
    class Waiting(LossGraphs):
        def record(self, body):
            return super().record(lambda: torch.ones(1, device="cuda").item() and body())

    case, outer = random_case(3, "ordinary", "cuda"), torch.cuda.current_stream()
    compute_loss = captured_loss(case, graphs=Waiting)
    assert compute_loss.graphs.is_off and torch.cuda.current_stream() == outer
    assert not torch.cuda.is_current_stream_capturing()
    predictions, targets = other_values(case, 1)
    found = forward(compute_loss, case, predictions, targets)
    torch.testing.assert_close(found, without_graph(BatchedLossOTA, case, predictions, targets)[:2])
    assert captured_loss(case, graphs=LossGraphs).graphs.counts["replayed"] == 1
