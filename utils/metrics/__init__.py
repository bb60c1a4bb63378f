from utils.metrics.detection import ConfusionMatrix, DetectionScores, ap_per_class, fitness

__all__ = ["ConfusionMatrix", "DetectionScores", "ap_per_class", "fitness"]
