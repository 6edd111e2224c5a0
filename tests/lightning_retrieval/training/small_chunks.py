"""A small network and inputs in float64, and the loss and gradients to compare chunks by."""

import torch
from torch import nn

from lightning_retrieval.losses import SmoothAPLoss

LABELS = torch.arange(11) % 4


def net(dropout=0.0, dtype=torch.float64, noise=None):
    noise = nn.Dropout(dropout) if noise is None else noise
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), noise, nn.Linear(8, 3)).to(dtype)


def images(dtype=torch.float64):
    return torch.randn(11, 5, dtype=dtype)


def smooth_ap(embeddings):
    return SmoothAPLoss(tau=0.2)(embeddings, LABELS.to(embeddings.device))


def gradients_of(module):
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return gradients


def chunk_by_chunk(embed, x, loss, size):
    """All chunks' graphs at once, embedded in order: the same random numbers, none of the tricks."""
    value = loss(torch.cat([embed(chunk) for chunk in x.split(size or len(x))]))
    value.backward()
    return value.detach()


def batch_norm(momentum):
    return nn.BatchNorm1d(8, momentum=momentum)


def net_with(norm):
    """The norm's input is linear in the images, so its mean over the batch does not depend on the chunks."""
    layers = nn.Linear(5, 16), nn.Unflatten(1, (8, 2)), norm, nn.Flatten(), nn.Tanh(), nn.Linear(16, 3)
    return nn.Sequential(*layers).double()


def statistics_of(norm):
    return {name: buffer.clone() for name, buffer in norm.named_buffers()}
