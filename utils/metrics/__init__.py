"""How good a detector is: AP, confusion matrix, COCO's scores, scores by head.

Read in this order: names (that differ), detection (matching, curves, mAP, fitness), multi_head, coco_annotations (the
user's json), coco (result file and official scores), text_files (--save-txt).
"""

from utils.metrics.detection import ConfusionMatrix, DetectionScores, ap_per_class, fitness

__all__ = ["ConfusionMatrix", "DetectionScores", "ap_per_class", "fitness"]
