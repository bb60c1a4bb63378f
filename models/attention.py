"""CBAM: attention over channels, then over places (Woo et al. 2018, arXiv 1807.06521)."""

import torch
from torch import nn


class ChannelAttention(nn.Module):
    """A weight 0..1 for every channel [b x c x 1 x 1], from its mean and its maximum."""

    def __init__(self, channels):
        super().__init__()
        hidden = max(channels // 16, 1)
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.max_pool = nn.AdaptiveMaxPool2d(1)
        self.fc = nn.Sequential(
            nn.Conv2d(channels, hidden, 1, bias=False), nn.ReLU(), nn.Conv2d(hidden, channels, 1, bias=False)
        )
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        return self.sigmoid(self.fc(self.avg_pool(x)) + self.fc(self.max_pool(x)))


class SpatialAttention(nn.Module):
    """A weight 0..1 for every place [b x 1 x h x w], from the mean and the maximum over channels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)
        self.sigmoid = nn.Sigmoid()

    def forward(self, x):
        return self.sigmoid(self.conv(torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1)))


class CBAM(nn.Module):
    """Features [b x c x h x w], weighted by channel and then by place."""

    def __init__(self, channels):
        super().__init__()
        self.channel_attention = ChannelAttention(channels)
        self.spatial_attention = SpatialAttention()

    def forward(self, x):
        x = x * self.channel_attention(x)
        return x * self.spatial_attention(x)
