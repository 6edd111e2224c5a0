"""Data modules and data sets, the samplers of global batches, and the loader of training batches.

To add a data set, write a reader for it in `readers/` and add its name below. Names are imported when they are
first used, so that reading images needs no Lightning.
"""

from typing import TYPE_CHECKING

from lightning_retrieval.lazy_names import lazy_names

if TYPE_CHECKING:  # the public names; type checkers export names imported `as` themselves
    from lightning_retrieval.datamodules.base import RetrievalDataModule as RetrievalDataModule
    from lightning_retrieval.datamodules.detection.boxes import BoxDataModule as BoxDataModule
    from lightning_retrieval.datamodules.detection.boxes import BoxIndex as BoxIndex
    from lightning_retrieval.datamodules.detection.boxes import BoxSet as BoxSet
    from lightning_retrieval.datamodules.detection.boxes import DetectionDataModule as DetectionDataModule
    from lightning_retrieval.datamodules.detection.coco import CocoDetection as CocoDetection
    from lightning_retrieval.datamodules.detection.glyph_scenes import GlyphScenes as GlyphScenes
    from lightning_retrieval.datamodules.detection.pascal_voc import PascalVOC as PascalVOC
    from lightning_retrieval.datamodules.glyphs.glyphs import GlyphDataset as GlyphDataset
    from lightning_retrieval.datamodules.glyphs.glyphs import Glyphs as Glyphs
    from lightning_retrieval.datamodules.hugging_face import HuggingFaceImages as HuggingFaceImages
    from lightning_retrieval.datamodules.image_check import DataReport as DataReport
    from lightning_retrieval.datamodules.image_folder import ImageFolder as ImageFolder
    from lightning_retrieval.datamodules.image_index import ImageIndex as ImageIndex
    from lightning_retrieval.datamodules.image_module import ImageDataModule as ImageDataModule
    from lightning_retrieval.datamodules.image_set import ImageSet as ImageSet
    from lightning_retrieval.datamodules.image_table import ImageTable as ImageTable
    from lightning_retrieval.datamodules.item_seeds import item_generator as item_generator
    from lightning_retrieval.datamodules.loader import RetrievalDataLoader as RetrievalDataLoader
    from lightning_retrieval.datamodules.loader import resume_position as resume_position
    from lightning_retrieval.datamodules.pairs import Pairs as Pairs
    from lightning_retrieval.datamodules.readers.cub import CUB200 as CUB200
    from lightning_retrieval.datamodules.readers.ijbc import IJBC as IJBC
    from lightning_retrieval.datamodules.readers.in_shop import InShop as InShop
    from lightning_retrieval.datamodules.readers.inaturalist import INaturalist as INaturalist
    from lightning_retrieval.datamodules.readers.landmarks import LandmarksClean as LandmarksClean
    from lightning_retrieval.datamodules.readers.online_products import StanfordOnlineProducts as StanfordOnlineProducts
    from lightning_retrieval.datamodules.readers.revisited import RevisitedOxford as RevisitedOxford
    from lightning_retrieval.datamodules.readers.revisited import RevisitedParis as RevisitedParis
    from lightning_retrieval.datamodules.readers.vehicle_id import VehicleID as VehicleID
    from lightning_retrieval.datamodules.readers.vgg_face2 import VGGFace2 as VGGFace2
    from lightning_retrieval.datamodules.samplers.all_classes import AllClassesSampler as AllClassesSampler
    from lightning_retrieval.datamodules.samplers.base import GlobalBatchSampler as GlobalBatchSampler
    from lightning_retrieval.datamodules.samplers.base import RandomBatchSampler as RandomBatchSampler
    from lightning_retrieval.datamodules.samplers.category import CategorySampler as CategorySampler
    from lightning_retrieval.datamodules.samplers.pairs import PairSampler as PairSampler
    from lightning_retrieval.datamodules.samplers.pk import PKSampler as PKSampler
    from lightning_retrieval.datamodules.samplers.tags import TagSampler as TagSampler
    from lightning_retrieval.datamodules.text_table import TextTable as TextTable
    from lightning_retrieval.preparation.training_transforms import training_transform as training_transform

__getattr__, __dir__ = lazy_names(__name__)
