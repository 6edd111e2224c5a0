"""Data modules, samplers and the loader that carries them into training."""

from lightning_retrieval.datamodules.base import RetrievalDataModule
from lightning_retrieval.datamodules.files.data_report import DataReport
from lightning_retrieval.datamodules.glyphs.glyphs import GlyphDataset, Glyphs
from lightning_retrieval.datamodules.images.image_folder import ImageFolder
from lightning_retrieval.datamodules.images.image_index import ImageIndex
from lightning_retrieval.datamodules.images.image_module import ImageDataModule
from lightning_retrieval.datamodules.images.image_set import ImageSet
from lightning_retrieval.datamodules.images.image_table import ImageTable
from lightning_retrieval.datamodules.images.transforms import reference_transform
from lightning_retrieval.datamodules.item_seeds import item_generator
from lightning_retrieval.datamodules.loader import RetrievalDataLoader, resume_position
from lightning_retrieval.datamodules.readers.cub import CUB200
from lightning_retrieval.datamodules.readers.ijbc import IJBC
from lightning_retrieval.datamodules.readers.in_shop import InShop
from lightning_retrieval.datamodules.readers.inaturalist import INaturalist
from lightning_retrieval.datamodules.readers.landmarks import LandmarksClean
from lightning_retrieval.datamodules.readers.online_products import StanfordOnlineProducts
from lightning_retrieval.datamodules.readers.revisited import RevisitedOxford, RevisitedParis
from lightning_retrieval.datamodules.readers.vehicle_id import VehicleID
from lightning_retrieval.datamodules.readers.vgg_face2 import VGGFace2
from lightning_retrieval.datamodules.samplers.all_classes import AllClassesSampler
from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler
from lightning_retrieval.datamodules.samplers.category import CategorySampler
from lightning_retrieval.datamodules.samplers.pk import PKSampler

__all__ = [
    "CUB200",
    "IJBC",
    "AllClassesSampler",
    "CategorySampler",
    "DataReport",
    "GlobalBatchSampler",
    "GlyphDataset",
    "Glyphs",
    "INaturalist",
    "ImageDataModule",
    "ImageFolder",
    "ImageIndex",
    "ImageSet",
    "ImageTable",
    "InShop",
    "LandmarksClean",
    "PKSampler",
    "RetrievalDataLoader",
    "RetrievalDataModule",
    "RevisitedOxford",
    "RevisitedParis",
    "StanfordOnlineProducts",
    "VGGFace2",
    "VehicleID",
    "item_generator",
    "reference_transform",
    "resume_position",
]
