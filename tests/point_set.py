"""Random vectors in classes of four, a data set that trains in a moment."""

import torch


class Points(torch.utils.data.Dataset):
    """Random images in classes of four.

    Args:
        seed: of the images.
        size: number of images.
        shape: of an image.
        dtype: of its numbers.
    """

    def __init__(self, seed, size=27, *, shape=(6,), dtype=torch.float32):
        self.images = torch.randn(size, *shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
        self.labels = torch.arange(size) // 4

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"images": self.images[index], "labels": self.labels[index], "ids": torch.tensor(int(index))}
