"""Small images with bright squares as objects, for detectors that train in a second."""

import torch

from lightning_retrieval.datamodules.detection.boxes import DetectionDataModule


def make_scene(index, size=64):
    """An image of one or two squares: grey ones are class 1, white ones class 2."""
    generator = torch.Generator().manual_seed(index)
    image = 0.1 * torch.rand(3, size, size, generator=generator)
    boxes, labels = [], []
    for half in range(1 + index % 2):
        side = int(torch.randint(12, 24, (), generator=generator))
        left, top = torch.randint(0, size // 2 - 24, (2,), generator=generator).tolist()
        left += half * size // 2
        label = int(torch.randint(1, 3, (), generator=generator))
        image[:, top : top + side, left : left + side] += 0.4 * label
        boxes.append([left, top, left + side, top + side])
        labels.append(label)
    target = {"boxes": torch.tensor(boxes, dtype=torch.float32), "labels": torch.tensor(labels)}
    return image, {**target, "image_id": torch.tensor(index)}


def make_batch(indices, **changes):
    items = [make_scene(index) for index in indices]
    images, targets = [image for image, _ in items], [target for _, target in items]
    targets[0] = {**targets[0], **changes}
    return images, targets


NOTHING = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0, dtype=torch.long)}


class Scenes(torch.utils.data.Dataset):
    def __init__(self, start, size):
        self.start, self.size = start, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return make_scene(self.start + int(index))


class SceneData(DetectionDataModule):
    """Eight training images, and five for evaluation, which two processes cannot share equally."""

    class_names = ("grey", "white")
    train_set, val_set, test_set = Scenes(0, 8), Scenes(100, 5), Scenes(200, 5)
