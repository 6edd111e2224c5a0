"""Builds a pretrained network that a user names in place of a checkpoint, and rebuilds it from what embeddings record.

Its embeddings are the pooled features of the backbone. The record is data, as a checkpoint is: it describes an
`Embedder`, and names its weights in the lists of torchvision and timm, in the cache of the Hugging Face hub or in a
file of tensors. Weights that are not on this machine are downloaded only if the user names them.
"""

from typing import Any

from lightning_retrieval.checks import first_line
from lightning_retrieval.first_checks import is_local_file
from lightning_retrieval.invalid import InvalidValue, reported_as
from lightning_retrieval.models.embedder import Embedder
from lightning_retrieval.models.pretrained import without_downloads
from lightning_retrieval.models.retrieval_network import RetrievalNetwork
from lightning_retrieval.paths import check_path
from lightning_retrieval.plain_data import class_path, rebuild
from lightning_retrieval.search.commands.shared import PretrainedBackbone

BACKBONE = "backbone"  # entry of the metadata of embeddings: the arguments of the `Embedder`
FOLDER_PREFIX = "hf/"  # before the path of a folder


def load_backbone(given: PretrainedBackbone) -> RetrievalNetwork:
    """Build the network that a user has named, on the CPU; its weights may be downloaded.

    Raises:
        ValueError: if the backbone or its weights are unknown, or do not belong together.
        FileNotFoundError: if a file of weights does not exist.
        ModuleNotFoundError: if the library of the backbone is not installed.
    """
    name, weights = given.backbone, given.weights
    if is_local_file(weights):
        weights = check_path("weights", weights).absolute().as_posix()
    if name.startswith(FOLDER_PREFIX):
        folder = check_path("backbone", name.removeprefix(FOLDER_PREFIX))
        if folder.is_dir():
            name = f"{FOLDER_PREFIX}{folder.absolute().as_posix()}"
    with reported_as():
        embedder = Embedder(name, None, weights=weights, image_size=given.image_size, preparation=given.preparation)
    return _network(embedder)


def record_of_backbone(network: RetrievalNetwork) -> dict[str, Any]:
    """The arguments from which `rebuild_backbone` builds the network again."""
    embedder: Any = network.embedder
    return {**embedder.init_args(), "weights": embedder.weights}  # with the path of a file


def rebuild_backbone(record: Any, *, made: str) -> RetrievalNetwork:
    """Build the network that embeddings record, on the CPU, without downloading anything.

    Args:
        record: what `record_of_backbone` returned, as read from a file.
        made: what was made with the network, with a verb, for error messages.

    Raises:
        ValueError: if the weights are not on this machine, or the record is not one of a pretrained network.
        ModuleNotFoundError: if the library of the backbone is not installed.
    """
    try:
        with without_downloads():
            description = {"class_path": class_path(Embedder), "init_args": dict(record)}
            return _network(rebuild("backbone", description, Embedder))
    except ModuleNotFoundError:
        raise
    except Exception as error:  # constructors raise errors of many types for arguments of a file
        rule = f"must be given with `weights`, because the backbone that the {made} made with cannot be loaded here"
        got = f"{shown_backbone(record)} ({first_line(error)})"
        raise InvalidValue(rule, argument="backbone", got=got) from None


def shown_backbone(record: Any) -> str:
    """The network that embeddings record, for messages."""
    preparation = record.get("preparation") or {}
    image_size = preparation.get("image_size", "of the weights")
    return f"{record.get('backbone')!r} with the weights {record.get('weights')!r} and the image size {image_size}"


def _network(embedder: Embedder) -> RetrievalNetwork:
    network: Any = RetrievalNetwork(embedder)
    network.steps_of_training = 0  # as for the network of a checkpoint
    network.eval()
    return network  # type: ignore[no-any-return]
