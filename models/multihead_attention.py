"""The variant of 1B4H whose heads look at the features through attention of their own."""

from torch import nn

from models.attention import CBAM
from models.multihead import DEFAULT_HEADS, MultiHeadDetect


class MultiHeadDetectAttention(MultiHeadDetect):
    """MultiHeadDetect with a CBAM in front of every output convolution."""

    def __init__(self, nc=80, anchors=(), ch=(), head_config=None, full_head=False, num_heads=DEFAULT_HEADS):
        super().__init__(nc, anchors, ch, head_config, full_head, num_heads)
        self.attentions = nn.ModuleList(nn.ModuleList(CBAM(channels) for channels in ch) for _ in range(self.num_heads))

    def _features(self, head, level, features):
        return self.attentions[head][level](features)
