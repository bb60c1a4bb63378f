from utils.plots.images import output_to_targets, plot_images
from utils.plots.run import compare_results, plot_results, read_results

__all__ = ["compare_results", "output_to_targets", "plot_images", "plot_results", "read_results"]
