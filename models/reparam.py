"""Re-parameterisation: the same function with fewer layers.

Pure functions on tensors, and `reparameterize`, which turns a training model into its deploy form.
"""

from copy import deepcopy

import torch
from torch.nn import functional as F


def fold_batchnorm(weight, bias, norm):
    """Weight [o x i x kh x kw] and bias [o] of a convolution that includes the batch norm `norm` (in eval mode).

    `bias` may be None. The arithmetic uses the dtype of the weights.
    """
    scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    if bias is not None:
        shift = shift + bias * scale
    return weight * scale.reshape(-1, 1, 1, 1), shift


def identity_kernel(channels, groups, like):
    """The kernel [channels x channels/groups x 3 x 3] that passes every channel through; dtype and device of `like`."""
    per_group = channels // groups
    kernel = torch.zeros(channels, per_group, 3, 3, dtype=like.dtype, device=like.device)
    output = torch.arange(channels, device=like.device)
    kernel[output, output % per_group, 1, 1] = 1
    return kernel


def merge_branches(dense, pointwise, identity_norm=None):
    """Weight and bias of the one 3x3 convolution that equals the sum of RepConv's branches.

    `dense` and `pointwise` are (convolution, batch norm) pairs with a 3x3 and a 1x1 kernel; `identity_norm` is the
    batch norm of the identity branch, or None.
    """
    weight, bias = fold_batchnorm(dense[0].weight, dense[0].bias, dense[1])
    small_weight, small_bias = fold_batchnorm(pointwise[0].weight, pointwise[0].bias, pointwise[1])
    weight, bias = weight + F.pad(small_weight, [1, 1, 1, 1]), bias + small_bias
    if identity_norm is None:
        return weight, bias
    passing = identity_kernel(identity_norm.num_features, dense[0].groups, like=weight)
    identity_weight, identity_bias = fold_batchnorm(passing, None, identity_norm)
    return weight + identity_weight, bias + identity_bias


def fold_implicit(weight, bias, added, factor):
    """Weight and bias of the 1x1 convolution that equals `factor * (conv(x + added))`.

    weight [o x i x 1 x 1], bias [o], added [1 x i x 1 x 1], factor [1 x o x 1 x 1].
    """
    factor = factor.flatten()
    offset = weight.flatten(1) @ added.flatten()
    return weight * factor.reshape(-1, 1, 1, 1), (bias + offset) * factor


@torch.no_grad()
def reparameterize(training_model, deploy_cfg):
    """The deploy twin (a new float32 Model of `deploy_cfg`, on the CPU, in eval mode) of an un-fused training model.

    The implicit knowledge is folded into the detection convolutions, an auxiliary head is dropped, and the trained
    anchors, nc and names go along. Batch norms and RepConv branches stay as they are. Raises ValueError if `deploy_cfg`
    does not describe the same network.
    """
    cfg = training_model.yaml
    anchors_per_level = cfg["anchors"] if isinstance(cfg["anchors"], int) else None
    deploy = type(training_model)(deploy_cfg, ch=cfg["ch"], nc=cfg["nc"], anchors=anchors_per_level)
    deploy.names = list(training_model.names)
    source = {key: value.detach().float().cpu() for key, value in training_model.state_dict().items()}
    source.update(_deploy_head_entries(training_model.model[-1], prefix=f"model.{len(deploy.model) - 1}."))

    target = deploy.state_dict()
    lacking = [key for key, value in target.items() if key not in source or source[key].shape != value.shape]
    if lacking:
        raise ValueError(
            f"{deploy_cfg} is not the deploy form of this training model: {len(lacking)} of {len(target)} entries have "
            f"no counterpart of equal shape, first {lacking[0]}; choose the cfg/deploy file of the same name"
        )
    deploy.load_state_dict({key: source[key] for key in target})
    return deploy.eval()


def _deploy_head_entries(head, prefix):
    """State entries of the plain detection layer that equals `head`, named for a layer with the key `prefix`."""
    head = deepcopy(head).float()
    entries = {f"{prefix}anchors": head.anchors, f"{prefix}anchor_grid": head.anchor_grid}
    for level in range(head.nl):
        weight, bias = head.folded(level)
        entries[f"{prefix}m.{level}.weight"], entries[f"{prefix}m.{level}.bias"] = weight, bias
    return {key: value.detach().cpu() for key, value in entries.items()}
