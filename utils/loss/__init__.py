"""The detection losses: box, objectness, class.

Read in this order: criterion (the three terms; it is handed an assigner), assigner (which cell is trained on which
target: candidates, cost, dynamic k, conflicts, one function each), multi_head (one loss for each of several heads).
For --fast-loss the same for a whole batch at once: candidates (worked out on the host), batched_assigner, batched,
gradients (closed forms for batched). Where Triton runs, on_gpu does all that, by the kernels of assign_kernels and
loss_kernels. The reference imports none of these, so neither does a run without flags.
"""

from utils.loss.criterion import ComputeLoss, ComputeLossAuxOTA, ComputeLossOTA, build_losses, losses_by_epoch

__all__ = ["ComputeLoss", "ComputeLossAuxOTA", "ComputeLossOTA", "build_losses", "losses_by_epoch"]
