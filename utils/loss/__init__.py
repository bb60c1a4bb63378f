from utils.loss.criterion import ComputeLoss, ComputeLossAuxOTA, ComputeLossOTA, build_losses, losses_by_epoch

__all__ = ["ComputeLoss", "ComputeLossAuxOTA", "ComputeLossOTA", "build_losses", "losses_by_epoch"]
