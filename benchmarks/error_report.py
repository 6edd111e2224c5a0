"""Time and memory of the report of a model's errors, without the embedding of the images.

    python benchmarks/error_report.py

The embeddings are class centres with noise, the images are files of 128 x 128 pixels, and 20 labels are wrong. The
time is that of finding all errors and of writing the page and the table; the memory is the largest resident size of
the process, with torch and the embeddings. It takes a minute on two cores.
"""

import resource
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timing import arguments, environment, report

from lightning_retrieval.datamodules.image_index import ImageIndex
from lightning_retrieval.ranking.rows import normalize
from lightning_retrieval.search.commands.embedding import EmbeddedImages, ListedImages
from lightning_retrieval.search.commands.report import LabelledImages, find_in
from lightning_retrieval.search.report.files import write_report

DIM, OF_CLASS, NOISE, WRONG, FILES, MIB = 512, 12, 0.9, 20, 200, 1 << 20
