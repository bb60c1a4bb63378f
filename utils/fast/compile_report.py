"""DIAGNOSE_COMPILE=1: into how many graphs torch.compile cuts the model and the losses, and why."""

import torch

from utils.config.hyp import scale_hyp
from utils.loss import batched

NUM_IMAGES = 2  # the graphs do not depend on it, and BatchNorm wants more than one value
BOXES = ((0.3, 0.4, 0.2, 0.3), (0.6, 0.5, 0.4, 0.5))  # x, y, w, h, normalised


def explain(model, hyp, nc, image_size):
    """The report, as text, for `model` in training and for the batched losses (--fast-loss) that fit its head.

    `hyp` as its file gives it, `image_size` in pixels. The reference losses are not looked at: they are Python loops
    over layers and images, and never compiled.
    """
    model.hyp, model.nc, model.gr = scale_hyp(hyp, model.model[-1].nl, nc, image_size, 0.0), nc, 1.0
    parameter, stride = next(model.parameters()), int(model.stride.max())
    side = -(-image_size // stride) * stride
    images = torch.zeros(NUM_IMAGES, 3, side, side, device=parameter.device)
    rows = [(i, 0, *box) for i in range(NUM_IMAGES) for box in BOXES]
    with torch.autocast(parameter.device.type, enabled=parameter.device.type == "cuda"):
        predictions = _leaves(model.train()(images))
        levels = predictions if torch.is_tensor(predictions[0]) else predictions[0]  # of the first of several heads
        subjects = [(f"model, images {list(images.shape)}", model, (images,))]
        for name, loss in losses_of(model):
            sets = loss.prepare(torch.tensor(rows), [p.shape for p in levels[: loss.head.nl]], images.shape[2:])
            arguments = predictions, [candidates.to(parameter.device) for candidates in sets]
            subjects.append((name, loss.compute, arguments))
        return report([(name, _explain(function, arguments)) for name, function, arguments in subjects])


def _leaves(outputs):
    """Tensors in nested lists, cut off from what made them, to be differentiated by."""
    return outputs.detach().requires_grad_() if torch.is_tensor(outputs) else [_leaves(part) for part in outputs]


def losses_of(model):
    """(name, batched loss) of those that `model` can be trained with."""
    classes, head = batched.CLASSES, model.model[-1]
    if hasattr(head, "num_heads"):
        kinds = classes.plain, classes.ota
        return [(f"{kind.__name__}, {head.num_heads} heads", classes.heads(model, kind)) for kind in kinds]
    kinds = (classes.auxiliary,) if hasattr(head, "m2") else (classes.plain, classes.ota)
    return [(kind.__name__, kind(model)) for kind in kinds]


def _explain(function, arguments):
    torch.compiler.reset()
    return torch._dynamo.explain(function)(*arguments)


def report(explanations):
    """The text for (name, ExplainOutput of torch) pairs: counts of each, its reasons, and the sums."""
    lines = ["DYNAMO EXPLANATION REPORT", f"torch {torch.__version__}", ""]
    for name, found in explanations:
        lines.append(f"{name}: graph count {found.graph_count}, break count {found.graph_break_count}")
        lines += [f"    {number}. {_reason(reason)}" for number, reason in enumerate(found.break_reasons, 1)]
    graphs, breaks = (sum(getattr(found, f"{kind}_count") for _, found in explanations)
                      for kind in ("graph", "graph_break"))  # fmt: skip
    return "\n".join([*lines, "", f"total: graph count {graphs}, break count {breaks}"])


def _reason(reason):
    """What broke a graph, and the line of the program where it did."""
    where = f" ({reason.user_stack[-1].filename}:{reason.user_stack[-1].lineno})" if reason.user_stack else ""
    return " ".join(str(reason.reason).split())[:300] + where
