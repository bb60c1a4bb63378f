"""A recipe: the bytes in which a worker writes down the last steps of a sample, for the GPU to make them (finishing).

Lookup tables of hue, saturation and value [TABLES], four yes-or-no bytes, and, if the warp may wait, a grid (see
late_warp).
"""

from utils.data.fast.deferred import grid_bytes

TABLES = 3 * 256
RECOLOURED, UPSIDE_DOWN, MIRRORED, UNWARPED = range(TABLES, TABLES + 4)  # places of the yes-or-no bytes
RECIPE = TABLES + 4  # bytes of a recipe without a grid, which would begin here


def recipe_bytes(size, warp_later):
    """Length of a recipe for a picture of `size` x `size` pixels."""
    return RECIPE + (grid_bytes(size) if warp_later else 0)
