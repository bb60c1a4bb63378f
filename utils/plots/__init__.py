"""Everything that draws: plots of a run, grids of images with their boxes. Scripts import its names from here.

Read in this order: style (figures without a display), fonts, captions (where text goes), images (grids), run (curves,
confusion matrix, labels, searches).
matplotlib's object interface only, never pyplot, so that drawing is safe in a thread.
"""

from utils.plots.images import output_to_targets, plot_images
from utils.plots.run import compare_results, plot_results, read_results

__all__ = ["compare_results", "output_to_targets", "plot_images", "plot_results", "read_results"]
