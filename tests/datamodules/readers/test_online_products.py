"""Stanford Online Products: images are read as they were written."""

import pytest

from lightning_retrieval.datamodules import StanfordOnlineProducts
from tests.datamodules.readers.columns import columns
from tests.datamodules.trees import write_online_products

STRUCTURES = {"as unpacked": ("", ""), "online_products": ("Info_Files/", "images/"), "mixed": ("Info_Files/", "")}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_images_are_read_as_they_were_written(tmp_path, structure):
    lists, images = STRUCTURES[structure]
    written = write_online_products(tmp_path, lists, images)
    data = StanfordOnlineProducts(tmp_path)
    assert list(data.splits) == ["train", "test"]
    for split in data.splits:
        paths, classes, categories, _ = zip(*written[split])
        found = columns(data, split)
        assert found["paths"] == list(paths)
        assert found["labels"] == [sorted(set(classes)).index(number) for number in classes]
        assert list(map(int, found["classes"])) == list(classes)
        assert found["categories"] == [{2: 0, 12: 1}[category] for category in categories]
        assert found["roles"] is found["boxes"] is None
