"""The network of validation as CUDA graphs; on a CPU with a stand-in that runs the captured work again."""

from copy import deepcopy
from functools import partial

import pytest
import torch

from tests import step_cases
from tests.fast.test_graph_step import OnCPU as StepsOnCPU
from tests.fast.test_validation import case  # noqa: F401, a fixture
from utils.engine.evaluate import evaluate
from utils.fast import graph_network
from utils.fast.compile import tensors_in
from utils.fast.flat_optimizer import KeptHalfCopy
from utils.fast.graph_network import GraphNetwork, replayed
from utils.fast.graph_step import GraphSteps
from utils.fast.validation import FastValidation, without_search
from utils.ops.cuda_graph import WARM_UP_CALLS


class Replayed:
    """A stand-in for a CUDA graph: does the work once more, and writes what it returns where it was at first."""

    def __init__(self, body):
        self.body, self.outputs = body, body()

    def replay(self):
        for place, new in zip(tensors_in(self.outputs), tensors_in(self.body()), strict=True):
            place.copy_(new)


class OnCPU(GraphNetwork):
    """GraphNetwork without a GPU."""

    free = 0.5

    def record(self, body):
        graph = Replayed(body)
        return graph, graph.outputs

    def memory(self, device):
        return self.free * 10**9, 10**9

    def wait(self):
        pass


class Fused(torch.nn.Module):
    """Reads bytes, as models/fused does."""

    takes_bytes = True

    def __init__(self, model):
        super().__init__()
        self.model, self.num_calls = model, 0

    def forward(self, images):
        assert images.dtype == torch.uint8 and not self.training
        self.num_calls += 1
        return self.model(images / 255)


@pytest.fixture
def network():
    """Doubles the numbers of images and adds its weight."""
    layer = torch.nn.Linear(1, 1)
    return OnCPU(Fused(lambda images: [images * 510, [layer.weight.detach() + images.sum()]])), layer.weight.data


def images_of(*shape):
    return torch.randint(256, shape, dtype=torch.uint8)


def test_a_shape_is_captured_when_it_has_come_often(network):
    graphs, weight = network
    for call in range(WARM_UP_CALLS + 3):
        for shape in ((2, 3, 8, 8), (2, 3, 4, 8), (1, 3, 8, 8)):
            images = images_of(*shape)
            weight += 1
            doubled, (total,) = graphs.eval()(images)
            torch.testing.assert_close(doubled, images * 2.0)
            assert total.item() == pytest.approx(weight.item() + images.sum().item() / 255, rel=1e-5)
        assert len(graphs.graphs) == 3 * (call >= WARM_UP_CALLS)
    assert {graph.inputs[0].data_ptr() for graph in graphs.graphs.values()} == {graphs.room.data_ptr()}, "one place"
    assert len(graphs.room) == 2 * 3 * 8 * 8


def test_a_larger_shape_that_comes_later_has_a_place_of_its_own(network):
    graphs, _ = network
    for shape in ((1, 3, 8, 8), (2, 3, 8, 8), (1, 3, 8, 8)):
        for _ in range(WARM_UP_CALLS + 2):
            images = images_of(*shape)
            torch.testing.assert_close(graphs.eval()(images)[0], images * 2.0)
    assert len(graphs.graphs) == 2


def test_no_more_shapes_than_that(network, monkeypatch):
    monkeypatch.setattr(graph_network, "MOST_SHAPES", 1)
    graphs, _ = network
    for size in (8, 4):
        for _ in range(WARM_UP_CALLS + 2):
            images = images_of(1, 3, size, size)
            torch.testing.assert_close(graphs.eval()(images)[0], images * 2.0)
    assert list(graphs.graphs) == [(1, 3, 8, 8)]


@pytest.mark.parametrize(
    ("change", "reason"),
    [({"record": lambda self, body: (_ for _ in ()).throw(torch.cuda.OutOfMemoryError("out of memory\nmore"))},
      "out of memory)"), ({"free": 0.05}, "only 50.0 MB of 1.0 GB would stay free)")],
)  # fmt: skip
def test_what_cannot_be_captured_is_one_warning(network, change, reason, caplog):
    network = type("Changed", (OnCPU,), change)(network[0].network).eval()
    for size in (8, 4):
        for _ in range(WARM_UP_CALLS + 2):
            images = images_of(1, 3, size, size)
            torch.testing.assert_close(network(images)[0], images * 2.0)
    (record,) = caplog.records
    assert record.levelname == "WARNING" and reason in record.message and not network.graphs
    assert network.network.num_calls >= 2 * (WARM_UP_CALLS + 2), "the ordinary way"


def test_work_that_needs_their_memory_has_it_when_that_of_the_training_was_not_enough(network, caplog):
    caplog.set_level("INFO")
    graphs, _ = network
    steps, images, attempts = StepsOnCPU(step_cases.new_trainer(batched=True)), images_of(1, 3, 8, 8), []

    def work(in_the_way):
        attempts.append((bool(steps.captured_update), len(graphs.graphs)))
        if in_the_way():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"

    for in_the_way, expected in (
        (lambda: steps.captured_update, [(True, 1), (False, 1)]),
        (lambda: steps.captured_update or graphs.graphs, [(True, 1), (False, 1), (False, 0)]),
        (lambda: graphs.graphs, [(True, 1), (False, 1), (False, 0)]),
    ):
        step_cases.run(steps, step_cases.batches(6))
        for _ in range(WARM_UP_CALLS + 1):
            torch.testing.assert_close(graphs.eval()(images)[0], images * 2.0)
        attempts.clear()
        assert steps.with_room(work)(in_the_way) == "done" and attempts == expected
    attempts.clear()
    with pytest.raises(torch.OutOfMemoryError):
        steps.with_room(work)(lambda: True)
    assert attempts == [(False, 0)] and caplog.text.count("given their memory back") == 1 + 2 + 2
    graphs.eval()(images)
    assert graphs.graphs and not graphs.is_off
    steps.finish()  # for the official score
    assert not graphs.graphs and graphs.room is None


def test_a_capture_of_the_training_takes_their_memory(network, caplog):
    caplog.set_level("INFO")
    graphs, images = network[0].eval(), images_of(1, 3, 8, 8)

    class Beside(StepsOnCPU):
        def record(self, body):
            if graphs.graphs:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().record(body)

    for _ in range(WARM_UP_CALLS + 1):
        graphs(images)
    assert graphs.graphs
    steps = Beside(step_cases.new_trainer(batched=True))
    step_cases.run(steps, step_cases.batches(6))
    assert not graphs.graphs and not graphs.is_off and not steps.is_off
    assert steps.counts == {"replayed": 3, "captured": 2, "ordinary": 3}
    assert caplog.text.count("given their memory back") == 1


def test_a_network_without_bytes_has_no_graphs():
    model = torch.nn.Identity()
    assert replayed(lambda given: given, model) is model
    assert isinstance(replayed(Fused, model), GraphNetwork)


def test_validation_with_new_weights_in_each_epoch(case):  # noqa: F811
    """The copy of the average is one and the same; its numbers change, and the graphs follow."""
    model, loader, compute_loss = case
    half_copy, made = KeptHalfCopy(), []

    def fuse(model):
        made.append(OnCPU(Fused(model)))
        return made[-1]

    quick, found = FastValidation().fused_by(fuse), []
    for epoch in range(WARM_UP_CALLS + 2):
        with torch.no_grad():
            for _, bias, *_ in model.model[-1].output_biases():
                bias += 0.05 * torch.randn_like(bias)
        now = half_copy(model).float()  # a CPU has no half convolutions that are worth it
        expected = FastValidation()(now, loader, 2, compute_loss=compute_loss)
        assert quick(now, loader, 2, compute_loss=compute_loss).results == expected.results, epoch
        found.append(expected.results)
    assert len(made) == 1 and len(set(found)) == len(found)
    assert set(made[0].graphs) == {tuple(images.shape) for images, *_ in loader}


# ---- on a GPU -------------------------------------------------------------------------------------------------------


def fuse(model):
    from models.fused.network import quietly_fused  # here: it needs Triton

    return quietly_fused(model)


@pytest.fixture
def on_gpu(case):  # noqa: F811
    model, loader, compute_loss = case
    yield model.cuda().to(memory_format=torch.channels_last), loader, compute_loss
    model.cpu()


@pytest.mark.gpu
@pytest.mark.parametrize("half", [True, False], ids=["half", "single"])
def test_on_a_gpu_the_same_bits_as_the_ordinary_form(on_gpu, half):
    model, _, _ = on_gpu
    copy = (KeptHalfCopy() if half else deepcopy)(model)
    with torch.no_grad(), without_search():
        fused = fuse(copy).eval()
        graphs = GraphNetwork(fused).eval()
        for call in range(WARM_UP_CALLS + 4):
            for parameter in copy.parameters():
                parameter += 1e-3 * torch.randn_like(parameter)
            for shape in ((4, 3, 64, 96), (4, 3, 96, 64), (1, 3, 64, 96)):
                images = images_of(*shape).cuda()
                expected = [part.clone() for part in tensors_in(fused(images))]
                assert all(map(torch.equal, tensors_in(graphs(images)), expected)), (call, shape)
    assert len(graphs.graphs) == 3


@pytest.mark.gpu
def test_validation_on_a_gpu(on_gpu):
    model, loader, compute_loss = on_gpu
    quick, made = FastValidation(partial(replayed, fuse)), []
    for _ in range(WARM_UP_CALLS + 2):
        made.append(quick(model, loader, 2, compute_loss=compute_loss).results)
    made.append(FastValidation(fuse)(model, loader, 2, compute_loss=compute_loss).results)
    assert len({results[:4] for results in made}) == 1
    assert all(results == pytest.approx(made[0], rel=1e-5) for results in made)
    assert made[0] == pytest.approx(evaluate(model, loader, 2, ["a", "b"], compute_loss=compute_loss).results, rel=1e-3)
    assert len(quick.network.graphs) == len({tuple(images.shape) for images, *_ in loader})


@pytest.mark.gpu
def test_crowded_and_single_images_on_a_gpu(on_gpu):
    """300 objects an image, of which the model finds thousands; the last batch is a single image."""
    model, _, compute_loss = on_gpu
    copy, rng, loader = KeptHalfCopy()(model), torch.Generator().manual_seed(0), []
    for size in (4, 4, 1):
        boxes = 0.05 + 0.9 * torch.rand(size * 300, 4, generator=rng) * torch.tensor((1, 1, 0.2, 0.2))
        numbers = torch.arange(size).repeat_interleave(300)[:, None], torch.randint(2, (size * 300, 1), generator=rng)
        loader.append((images_of(size, 3, 64, 96), torch.cat((*numbers, boxes), 1), ["a"] * size,
                       [((64, 96), ((1.0, 1.0), (0.0, 0.0)))] * size))  # fmt: skip
    quick, plain = FastValidation(partial(replayed, fuse)), FastValidation(fuse)
    for call in range(WARM_UP_CALLS + 2):
        found, expected = (way(copy, loader, 2, compute_loss=compute_loss) for way in (quick, plain))
        assert found.results == expected.results, call
        assert found.scores.num_predictions == expected.scores.num_predictions > 500
    assert len(quick.network.graphs) == 2 and expected.results[3] > 0
    single = FastValidation(fuse)(model, loader, 2, compute_loss=compute_loss).results
    # of thousands of boxes, that lie about a threshold, a few are found by one form only: rounding differs
    assert single == pytest.approx(evaluate(model, loader, 2, ["a", "b"], compute_loss=compute_loss).results, rel=2e-2)


@pytest.mark.gpu
def test_beside_a_training_in_graphs(on_gpu):
    """Neither touches the memory of the other: the same losses and scores as one after the other."""
    model, loader, _ = on_gpu
    alone, beside = (GraphSteps(step_cases.new_trainer(torch.device("cuda"), batched=True), 4) for _ in range(2))
    quick, scores = FastValidation(partial(replayed, fuse)), []

    def losses_of(steps, validate=lambda: None):
        found = []
        steps.begin_epoch()
        for number, batch in enumerate(step_cases.batches(16, torch.device("cuda"))):
            found.append(steps.step(number, 0, batch._replace(targets=batch.targets.cpu())))
            if number % 2:
                scores.append(validate())
        return torch.cat([*found, steps.late_items()])

    found = losses_of(beside, lambda: quick(model, loader, 2).results)
    torch.testing.assert_close(found, losses_of(alone), rtol=1e-2, atol=1e-3)
    assert beside.counts["replayed"] > 10 and quick.network.graphs and len(set(scores[:8])) == 1
