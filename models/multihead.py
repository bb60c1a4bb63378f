"""1B4H: one backbone, several detection heads, each for its own group of classes."""

import logging

import torch
from torch import nn
from torch.nn import functional as F

from models.detection import DetectionLayer

logger = logging.getLogger(__name__)

DEFAULT_HEADS = 4


class MultiHeadDetect(DetectionLayer):
    """Detection layer of several heads that see the same features and share the anchors.

    `head_config` (utils.head_config.HeadConfig) names the classes of every head, in local order. Without it the classes
    are divided evenly, in order, among `num_heads`. With `full_head` every head has a column for each of the nc
    classes, and its own ones count.

    Maps: per head, per level [b x na x ny x nx x 5 + head_nc, or 5 + nc with full_head]. Boxes [b x n x 5+nc]: those of
    head 0, of head 1, ...; scores stand at their class, and classes of other heads have score 0.
    """

    def __init__(self, nc=80, anchors=(), ch=(), head_config=None, full_head=False, num_heads=DEFAULT_HEADS):
        super().__init__(nc, anchors)
        self.head_config = head_config
        self.full_head = full_head
        self.head_classes = _classes_of_heads(nc, head_config, num_heads)
        self.num_heads = len(self.head_classes)
        self.head_nc = [len(classes) for classes in self.head_classes]
        self.no = 5 + nc  # columns of the boxes
        self.head_no = [5 + (nc if full_head else count) for count in self.head_nc]
        self.head_weights = [head_config.weights[h] if head_config else 1.0 for h in range(self.num_heads)]
        self.head_names = [head_config.head_names[h] if head_config else f"Head {h}" for h in range(self.num_heads)]
        self.register_buffer("columns", torch.zeros(self.num_heads, 5 + nc, dtype=torch.long), persistent=False)
        self.fix_one_class_score(bool(head_config and head_config.one_class_score == 1))
        self.heads = nn.ModuleList(
            nn.ModuleList(nn.Conv2d(channels, no * self.na, 1) for channels in ch) for no in self.head_no
        )

    def fix_one_class_score(self, fixed):
        """Whether the class score of a head with a single class is 1 at inference.

        Such a head gets no class loss, so what it learned for a score means nothing; stock behaviour: it is used.
        """
        for head, (classes, no) in enumerate(zip(self.head_classes, self.head_no, strict=True)):
            zero, one = no, no + 1  # the columns that `_in_all_classes` appends
            source = torch.full((5 + self.nc,), zero)
            source[:5] = torch.arange(5)
            source[[5 + c for c in classes]] = torch.tensor(self.class_columns(head))
            if fixed and len(classes) == 1:
                source[5 + classes[0]] = one
            self.columns[head] = source.to(self.columns)

    def class_columns(self, head):
        """Where the scores of a head's classes stand in its maps, in local order."""
        if self.full_head:
            return [5 + c for c in self.head_classes[head]]
        return list(range(5, 5 + self.head_nc[head]))

    def _maps(self, x):
        return [
            [self._as_map(conv(self._features(head, level, x[level]))) for level, conv in enumerate(convs)]
            for head, convs in enumerate(self.heads)
        ]

    def _features(self, head, level, features):
        """What a head sees of a level."""
        return features

    def _boxes(self, maps, decode):
        return torch.cat([self._in_all_classes(head, decode(levels)) for head, levels in enumerate(maps)], 1)

    def _in_all_classes(self, head, boxes):
        """Boxes [b x n x head_no] of a head as [b x n x 5+nc]."""
        padded = F.pad(F.pad(boxes, (0, 1)), (0, 1), value=1.0)  # a column of zeros and one of ones
        return padded.index_select(-1, self.columns[head])

    def level_maps(self, output):
        return output[0]

    def output_biases(self):
        return [
            (level, conv.bias, self.class_columns(head), self.head_nc[head])
            for head, convs in enumerate(self.heads)
            for level, conv in enumerate(convs)
        ]


def _classes_of_heads(nc, head_config, num_heads):
    """A list of class ids for each head."""
    if head_config is None:
        if nc % num_heads:
            raise ValueError(f"{nc} classes do not divide evenly among {num_heads} heads; give a head configuration")
        share = nc // num_heads
        return [list(range(h * share, (h + 1) * share)) for h in range(num_heads)]
    if head_config.nc != nc:
        raise ValueError(f"{head_config.path} groups {head_config.nc} classes, but the model has {nc}; let them agree")
    return [list(head_config.head_classes[h]) for h in range(head_config.num_heads)]


def heads_arguments(is_multi_head, cfg, head_config):
    """What the row of a detection layer cannot say: (head_config, full_head, number of heads) for several heads.

    The key `heads` of the model configuration is optional. Raises ValueError when it and `head_config` disagree.
    """
    if not is_multi_head:
        if head_config is not None:
            raise ValueError(
                f"{head_config.path} describes {head_config.num_heads} heads, but this model has one; "
                "choose a model with several, such as cfg/training/yolov7-tiny-1b4h.yaml"
            )
        return []
    wanted = cfg.get("heads")
    if head_config is None:
        assert "head_config" not in cfg, "this configuration was built with a head_config: pass it again"
        num_heads = wanted or DEFAULT_HEADS
        logger.info(
            "No head configuration: classes 0 to %d are divided in order among %d heads", cfg["nc"] - 1, num_heads
        )
        return [None, False, num_heads]
    if wanted not in (None, head_config.num_heads):
        raise ValueError(
            f"this model has {wanted} heads (its key `heads`), but {head_config.path} describes "
            f"{head_config.num_heads}; cfg/training/yolov7-tiny-1bnh.yaml takes any number"
        )
    logger.info("%s", head_config.summary())
    return [head_config, head_config.full_head, head_config.num_heads]
