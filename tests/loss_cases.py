"""The golden loss cases as inputs for the assigners and losses, and small models to call these with."""

import json
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import torch

from tests.parity import GOLDEN
from utils.loss import batched_assigner
from utils.loss.assigner import Matches
from utils.loss.candidates import find_candidates

FOLDER = GOLDEN / "train"
NAMES = [path.stem.removeprefix("loss_") for path in sorted(FOLDER.glob("loss_*.npz"))]
AUXILIARY = [name for name in NAMES if "_aux_" in name]
ORDINARY = [name for name in NAMES if "_aux_" not in name]
# Where the project repairs stock: the width of a non-square image, costs of saturated predictions.
RULED = {"g14_nc3_64x96_b2_nonsquare": "ruled_g14", "g15_nc3_64_b2_extreme_logits": "ruled_g15"}


@dataclass
class Case:
    arrays: dict  # the golden file
    model: SimpleNamespace
    predictions: list  # leaves that want a gradient
    targets: torch.Tensor
    images: torch.Tensor

    @property
    def size(self):
        return tuple(self.images.shape[-2:])

    @property
    def num_layers(self):
        return self.model.model[-1].nl

    def matching_inputs(self):
        head = self.model.model[-1]
        return self.predictions[: self.num_layers], self.targets, head.anchors, head.stride, self.size


def load(name, device="cpu"):
    with np.load(FOLDER / f"loss_{name}.npz") as file:
        arrays = dict(file)
    shape = [int(arrays[key]) for key in ("bs", "img_h", "img_w")]
    predictions = []
    while f"p{len(predictions)}" in arrays:
        values = torch.tensor(arrays[f"p{len(predictions)}"], dtype=torch.float32, device=device)
        predictions.append(values.requires_grad_())
    model = model_with_head(
        anchors=torch.tensor(arrays["anchors_grid"], device=device),
        stride=torch.tensor(arrays["stride"]),  # on the CPU, as in stock models
        num_classes=int(arrays["nc"]),
        **json.loads(str(arrays["hyp"])),
    )
    targets = torch.tensor(arrays["targets"], device=device)
    return Case(arrays, model, predictions, targets, torch.zeros(shape[0], 3, *shape[1:], device=device))


def model_with_head(anchors, stride, num_classes, **hyp):
    """A stand-in for a model: the attributes that the losses read. `hyp` over gains of 1 and nothing switched on."""
    gains = {"box": 1.0, "obj": 1.0, "cls": 1.0, "cls_pw": 1.0, "obj_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0}
    head = SimpleNamespace(nl=len(anchors), na=anchors.shape[1], nc=num_classes, anchors=anchors, stride=stride)
    return SimpleNamespace(hyp=gains | hyp, gr=1.0, nc=num_classes, model=[head])


def stable_arrays(name, arrays):
    """(assignment, loss, items, dynamic k) with "lowest candidate index first" and with the project's repairs."""
    if name in RULED:
        with np.load(FOLDER / f"{RULED[name]}.npz") as file:
            return tuple(file[f"ota_{key}"] for key in ("asg", "loss", "items", "dynamic_k"))
    keys = ("ota_stable_asg", "ota_stable_loss", "ota_stable_items", "ota_dynamic_k")
    return tuple(arrays[key] for key in keys)


def rows(matches):
    """Matches [n x 6: layer, image, anchor, y, x, target], as the golden assignments."""
    return np.concatenate(
        [
            torch.stack((torch.full_like(target, layer), *matches.cells(layer), target), 1).cpu().numpy()
            for layer, target in enumerate(matches.target)
        ]
    )


def matches_of(golden_rows, anchors):
    """The Matches that a golden assignment [n x 6] describes."""
    golden = torch.tensor(golden_rows, dtype=torch.long, device=anchors.device)
    layers = []
    for layer in range(len(anchors)):
        image, anchor, y, x, target = golden[golden[:, 0] == layer, 1:].unbind(1)
        layers.append((image, anchor, y, x, target, anchors[layer][anchor]))
    return Matches.of_layers(layers)


# --- the batched assignment as Matches, in the order of the reference's -----------------------------------------------


def candidates_of(inputs, reach=0.5):
    """The CandidateSet for the arguments of an assigner, on the device of its predictions."""
    predictions, targets, anchors, strides, size = inputs
    shapes = [prediction.shape for prediction in predictions]
    return find_candidates(targets.cpu(), shapes, anchors.cpu(), strides, size, reach=reach).to(targets.device)


def batched_ota(inputs, reach=0.5, num_ious=10):
    """As `assigner.ota`, by the batched assigner."""
    candidates = candidates_of(inputs, reach)
    rows = batched_assigner.gather_rows(candidates.tensors.cell_index, candidates.sizes.cells, inputs[0])
    return as_matches(candidates, batched_assigner.assign(rows.detach(), candidates, num_ious), inputs)


def as_matches(candidates, assigned, inputs):
    """The Matches of the candidates that are `assigned` [m] to a target, -1 for none."""
    _, targets, anchors, *_ = inputs
    tensors, layers, start = candidates.tensors, [], 0
    by_image = torch.from_numpy(np.argsort(targets[:, 0].cpu().numpy(), kind="stable")).to(assigned.device)
    for layer, (shape, size) in enumerate(zip(candidates.shapes, candidates.sizes.cells, strict=True)):
        won = ((assigned >= 0) & (tensors.layer_of_candidate == layer)).nonzero()[:, 0]
        index = tensors.cell_index[start : start + size][tensors.cell_of_candidate[won] - start]
        start += size
        image, anchor, y, x = torch.unravel_index(index, shape[:4])
        layers.append((image, anchor, y, x, by_image[assigned[won]], anchors[layer][anchor]))
    return Matches.of_layers(layers)


KINDS = ("ordinary", "empty images", "no targets", "duplicates", "zeros", "borders", "saturated", "crowded", "large")
STRIDES = (8, 16, 32, 64)


def random_case(seed, kind, device="cpu", auxiliary=False):
    """A random batch of `kind`: 3 or 4 layers, 1 to 1000 classes, square or not."""
    generator = torch.Generator().manual_seed(seed)

    def draw(options):
        return options[torch.randint(len(options), (), generator=generator)]

    num_layers, num_classes = draw((3, 4)), draw((1, 3, 5, 80)) if kind != "large" else 1000
    height, width, batch = draw((64, 128)), draw((64, 128)), draw((1, 2, 5))
    size = torch.tensor([4.0, 3.0]) * torch.tensor(STRIDES[:num_layers])[:, None, None]  # of the anchors, in pixels
    anchors = (
        size * torch.tensor([[0.4, 0.5], [0.7, 1.6], [1.0, 0.8]]) / torch.tensor(STRIDES[:num_layers])[:, None, None]
    )
    shapes = [(batch, 3, height // stride, width // stride, 5 + num_classes) for stride in STRIDES[:num_layers]]
    spread = {"zeros": 0.0, "saturated": 40.0}.get(kind, 2.0)
    predictions = [torch.randn(shape, generator=generator) * spread for shape in shapes * (2 if auxiliary else 1)]
    model = model_with_head(
        anchors=anchors.to(device), stride=torch.tensor(STRIDES[:num_layers]).float(), num_classes=num_classes,
        box=0.05, cls=0.3, cls_pw=draw((1.0, 0.7)), obj_pw=draw((1.0, 1.3)), fl_gamma=draw((0.0, 0.0, 1.5)),
        label_smoothing=draw((0.0, 0.1)),
    )  # fmt: skip
    return Case(
        {}, model, [prediction.to(device).requires_grad_() for prediction in predictions],
        random_targets(generator, kind, batch, num_classes, width).to(device),
        torch.zeros(batch, 3, height, width, device=device),
    )  # fmt: skip


def random_targets(generator, kind, batch, num_classes, width):
    """Targets [n x 6] for `random_case`, not sorted by image."""
    count = {"no targets": 0, "crowded": 60}.get(kind, 6) * batch
    image = torch.randint(batch, (count, 1), generator=generator)
    if kind == "empty images":
        image = image // 2 * 2
    classes = torch.randint(num_classes, (count, 1), generator=generator)
    size = (torch.randn(count, 2, generator=generator) * 0.8 - 1.7).exp().clamp(0.01, 0.95)
    centre = torch.rand(count, 2, generator=generator)
    if kind in ("borders", "zeros"):  # multiples of 4 pixels: grid lines and mid-cells
        centre, size = (centre * width / 4).round() * 4 / width, (size * width / 8).ceil() * 8 / width
    targets = torch.cat((image, classes, centre.clamp(0.001, 1.0), size.clamp(max=1)), 1)
    return torch.cat((targets, targets[::2])) if kind == "duplicates" else targets
