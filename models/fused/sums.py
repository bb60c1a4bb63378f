"""Kernels (Triton) of sums of maps with an activation: shortcuts, and the branches of RepConv. See kernels.py."""

import torch
import triton
import triton.language as tl

from models.fused.kernels import SIZES, activate, load_sum, of_three, of_two, slope_of_activation, store, tiles_of


@triton.jit(do_not_specialize=SIZES)
def _add_kernel(first, second, third, y, copy, num_pixels, num_channels, first_stride, second_stride, third_stride,
                y_stride, copy_stride, slope, KIND: tl.constexpr, TERMS: tl.constexpr, PLACES: tl.constexpr,
                ROWS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """y = activation(sum of the terms)."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & (channel < num_channels)[None, :]
    value = load_sum(first, second, third, pixel, channel, inside, first_stride, second_stride, third_stride, TERMS)
    store(activate(value, slope, KIND), y, copy, pixel, channel, inside, y_stride, copy_stride, PLACES)


@triton.jit(do_not_specialize=SIZES)
def _add_gradient_kernel(first, second, third, one, two, three, result, num_pixels, num_channels, first_stride,
                         second_stride, third_stride, one_stride, two_stride, three_stride, slope, KIND: tl.constexpr,
                         PIECES: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr,
                         CHANNELS: tl.constexpr):  # fmt: skip
    """The gradient of each term: sum of the pieces, times the slope of the activation at the sum of the terms."""
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    pixel = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = (pixel < num_pixels)[:, None] & (channel < num_channels)[None, :]
    change = load_sum(first, second, third, pixel, channel, inside, first_stride, second_stride, third_stride, PIECES)
    value = load_sum(one, two, three, pixel, channel, inside, one_stride, two_stride, three_stride, TERMS)
    change *= slope_of_activation(value, slope, KIND)
    store(change, result, result, pixel, channel, inside, num_channels, num_channels, 1)


def add_activation(terms, kind, slope, places):
    """Write activation(sum of 2 or 3 `terms`) to one or two `places`, all [b x c x h x w]."""
    tiles = tiles_of(terms[0])
    terms, strides, num_terms = of_three(terms)
    targets, target_strides, num_places = of_two(places)
    _add_kernel[tiles.every](
        *terms, *targets, *tiles.sizes, *strides, *target_strides, slope,
        KIND=kind, TERMS=num_terms, PLACES=num_places, **tiles.tile,
    )  # fmt: skip


def add_activation_gradient(pieces, terms, kind, slope):
    """The gradient of each term of `add_activation`, from 1 to 3 `pieces` of that of its output."""
    tiles, result = tiles_of(terms[0]), torch.empty_like(terms[0], memory_format=torch.channels_last)
    pieces, strides, num_pieces = of_three(pieces)
    terms, term_strides, num_terms = of_three(terms)
    _add_gradient_kernel[tiles.every](
        *pieces, *terms, result, *tiles.sizes, *strides, *term_strides, slope,
        KIND=kind, PIECES=num_pieces, TERMS=num_terms, **tiles.tile,
    )  # fmt: skip
    return result
