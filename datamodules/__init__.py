"""Data modules, samplers and the loader that carries them into training."""

from lightning_retrieval.datamodules.all_classes_sampler import AllClassesSampler
from lightning_retrieval.datamodules.base import RetrievalDataModule
from lightning_retrieval.datamodules.category_sampler import CategorySampler
from lightning_retrieval.datamodules.cub import CUB200
from lightning_retrieval.datamodules.glyphs import GlyphDataset, Glyphs
from lightning_retrieval.datamodules.ijbc import IJBC
from lightning_retrieval.datamodules.image_folder import ImageFolder
from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.datamodules.image_module import ImageDataModule
from lightning_retrieval.datamodules.image_set import ImageSet
from lightning_retrieval.datamodules.image_table import ImageTable
from lightning_retrieval.datamodules.in_shop import InShop
from lightning_retrieval.datamodules.inaturalist import INaturalist
from lightning_retrieval.datamodules.landmarks import LandmarksClean
from lightning_retrieval.datamodules.layout_report import LayoutReport
from lightning_retrieval.datamodules.loader import RetrievalDataLoader, SeededIndex, index_generator, resume_position
from lightning_retrieval.datamodules.online_products import StanfordOnlineProducts
from lightning_retrieval.datamodules.revisited import RevisitedOxford, RevisitedParis
from lightning_retrieval.datamodules.samplers import GlobalBatchSampler, PKSampler
from lightning_retrieval.datamodules.transforms import reference_transform
from lightning_retrieval.datamodules.vehicle_id import VehicleID
from lightning_retrieval.datamodules.vgg_face2 import VGGFace2

__all__ = [
    "CUB200",
    "IJBC",
    "AllClassesSampler",
    "CategorySampler",
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
    "LayoutReport",
    "PKSampler",
    "RetrievalDataLoader",
    "RetrievalDataModule",
    "RevisitedOxford",
    "RevisitedParis",
    "SeededIndex",
    "StanfordOnlineProducts",
    "VGGFace2",
    "VehicleID",
    "index_generator",
    "reference_transform",
    "resume_position",
]
