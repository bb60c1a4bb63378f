"""Models from checkpoint files, under the import path that other tools expect."""

import torch
from torch import nn

from models.yolo import Model
from utils.engine.checkpoint_reader import check_finite, read_checkpoint, transfer
from utils.head_config import of_model_yaml
from utils.system.files import counted
from utils.system.streams import quiet_loggers


class Ensemble(nn.ModuleList):
    """Several models of equal classes as one: their predictions [B x n x no] stand behind each other.

    It has the names of the last and the stride of the one with the largest.
    """

    def forward(self, images, augment=False):
        return torch.cat([model(images, augment=augment)[0] for model in self], 1), None


def rebuild(stored, source="checkpoint"):
    """A Model (float32, evaluation mode) of a StoredModel: built from its yaml, then filled.

    Raises ValueError when there is no yaml, or when the tensors do not fit the model that it describes.
    """
    if stored.yaml is None:
        raise ValueError(
            f"{source} holds only tensors and no model yaml: train from it with --cfg, then use that result"
        )
    try:
        # building draws random weights, which are overwritten, and logs the layers, which the training has logged
        with torch.random.fork_rng(devices=[]), quiet_loggers("models"):
            model = Model(dict(stored.yaml), head_config=of_model_yaml(stored.yaml, source))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    num_taken, num_own = transfer(model, stored.state), len(model.state_dict())
    if num_taken != num_own:
        raise ValueError(f"{source}: only {num_taken} of the {num_own} tensors of its model fit; the file is damaged")
    for name, value in stored.attributes.items():
        setattr(model, name, value)
    return model.eval()


def _load(path):
    stored = read_checkpoint(path).for_inference()
    check_finite(stored, path)
    return rebuild(stored, path)


def attempt_load(weights, map_location=None, fuse=True):
    """The model of a checkpoint, ready for inference on `map_location`; a list of paths gives an Ensemble.

    `fuse` folds its batch norms and the like, which makes it faster and unfit for training.

    Raises ValueError, naming the file, for anything that is not a readable YOLOv7 checkpoint, and for an ensemble of
    models with different numbers of classes.
    """
    paths = weights if isinstance(weights, (list, tuple)) else [weights]
    models = [_load(path) for path in paths]
    models = [(model.fuse() if fuse else model).eval().to(map_location) for model in models]
    if len(models) == 1:
        return models[0]
    counts = {str(path): model.model[-1].nc for path, model in zip(paths, models, strict=True)}
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{path} has {counted(nc, 'class', 'classes')}" for path, nc in counts.items())
        raise ValueError(f"{found}; an ensemble needs equal ones")
    ensemble = Ensemble(models)
    ensemble.names, ensemble.stride = models[-1].names, max((model.stride for model in models), key=torch.max)
    return ensemble
