"""What `lightning-retrieval index` and `search` do: embed the images of a folder, and find those nearest to others.

The index remembers which checkpoint it was made with and how images are prepared for it, so that a query is embedded as
the gallery was.
"""

import importlib
import io
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm  # type: ignore[import-untyped]

from lightning_retrieval.checks import check_choice, check_integer
from lightning_retrieval.search.index import RetrievalIndex
from lightning_retrieval.search.storage import check_folder, file_digest
from lightning_retrieval.training.module import RetrievalModule

GLYPHS = "glyphs"
TRANSFORMS = ("plain", "smooth_ap", "roadmap", "ap_gem", GLYPHS)


@dataclass(frozen=True)
class Unread:
    """An image file that could not be read."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"cannot read the image {shown(self.path)} ({self.reason})"


@dataclass(frozen=True)
class Hit:
    """One result of a query."""

    rank: int
    id: int
    path: str
    similarity: float

    @property
    def distance(self) -> float:
        """The cosine distance, 0 for the same direction."""
        return max(0.0, 1 - self.similarity)


@dataclass(frozen=True)
class Answer:
    """A query with its results, nearest first."""

    query: str
    hits: list[Hit]


def index_images(
    checkpoint: Path,
    images: Path,
    output: Path,
    *,
    transform: str | None = None,
    factory: str = "Flat",
    parameters: str = "",
    shards: int = 1,
    batch_size: int = 32,
    num_workers: int = 0,
    device: str = "cpu",
) -> tuple[RetrievalIndex, list[Unread]]:
    """Embed all images below a folder, and save the index of them.

    Args:
        checkpoint: of a `RetrievalModule`.
        images: the folder; files of a suffix that Pillow opens are taken, at any depth, hidden ones not.
        output: the folder of the index.
        transform: one of `TRANSFORMS`; where None, that of the evaluation in training, which the checkpoint names if
            the data module was one of images in files; else `"plain"` for a model of colour images, `"glyphs"` for
            grey ones. `about["transform"]` of the index is what was taken, `about["transform_from"]` who said so.
        factory: faiss' factory string.
        parameters: of the search, in faiss' words.
        shards: parts of the index.
        batch_size: images embedded at a time; one by one with `"ap_gem"`, which keeps their sizes.
        num_workers: processes that read images.
        device: that the model runs on.

    Returns:
        The index and the images that could not be read.

    Raises:
        FileNotFoundError: if the checkpoint or the folder is not there.
        ValueError: if no image can be read, or something else does not fit.

    Cost:
        Two times 4 bytes for each number of an embedding, for the embeddings and for a `"Flat"` index of them.
    """
    who = "index"
    check_folder(who, output)
    RetrievalIndex(1, shards=shards)  # refused before the work
    if not images.is_dir():
        raise FileNotFoundError(f"{who}: `--images` must be a folder of images, got {images}, which is none.")
    paths = image_paths(images)
    if not paths:
        raise ValueError(f"{who}: `--images` must be a folder of images, got {images}, in which there is none.")
    model = _Model.load(who, checkpoint, transform, batch_size, num_workers, device)
    about = {**model.about, "images": str(images.absolute())}
    indexes: list[RetrievalIndex] = []

    def begin(dim: int) -> None:  # so that what does not fit the model is refused after the first images
        indexes.append(RetrievalIndex(dim, factory, parameters=parameters, shards=shards, about=about))

    places, embeddings, unread = model.embed(images, paths, names=paths, begin=begin)
    if not places:
        raise ValueError(f"{who}: none of the {len(paths)} images in {images} can be read, the first: {unread[0]}.")
    (index,) = indexes
    index.add(embeddings, torch.tensor(places), [paths[place] for place in places])
    index.save(output)
    return index, unread


def search_images(
    index: RetrievalIndex,
    queries: Sequence[str],
    k: int | None = None,
    *,
    checkpoint: Path | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    device: str = "cpu",
) -> tuple[list[Answer], list[Unread]]:
    """Find the images nearest to each query.

    Args:
        index: made by `index_images`.
        queries: image files.
        k: results of each, at most the images of the index; where None, 10, or all where there are fewer.
        checkpoint: where the model lies now; where None, where it lay when the index was made.
        batch_size: images embedded at a time.
        num_workers: processes that read images.
        device: that the model runs on.

    Returns:
        Answers, and the queries that could not be read.

    Raises:
        FileNotFoundError: if the checkpoint is not there.
        ValueError: if the index is not of images, the checkpoint is another one, `k` is too large, or no query can be
            read.
    """
    who, about = "search", index.about
    if not {"checkpoint", "checkpoint_sha256", "transform"} <= about.keys():
        raise ValueError(f"{who}: `--index` must be one that `lightning-retrieval index` made, of images.")
    if k is None:
        k = max(1, min(10, len(index)))
    check_integer(who, "-k", k, least=1)
    if k > len(index):
        raise ValueError(f"{who}: `-k` must be at most the {len(index)} images of the index, got {k}; ask for fewer.")
    path = Path(about["checkpoint"]) if checkpoint is None else checkpoint
    if checkpoint is None and not path.is_file():
        raise FileNotFoundError(
            f"{who}: the checkpoint that the index was made with is no longer at {path}; say where it is with "
            "`--checkpoint`."
        )
    model = _Model.load(who, path, about["transform"], batch_size, num_workers, device)
    if model.about["checkpoint_sha256"] != about["checkpoint_sha256"]:
        raise ValueError(
            f"{who}: {path} is not the checkpoint that the index was made with, so that their embeddings do not "
            "compare; give that one with `--checkpoint`, or build the index again."
        )
    files = [Path(os.path.abspath(query)) for query in queries]
    top = Path(files[0].anchor)
    below = [file.relative_to(top).as_posix() for file in files]
    places, embeddings, unread = model.embed(top, below, names=[str(file) for file in files])
    if not places:
        raise ValueError(f"{who}: none of the {len(files)} queries can be read, the first: {unread[0]}.")
    similarities, ids = index.search(embeddings, k)
    answers = []
    for place, near, row in zip(places, similarities.tolist(), ids):
        found = row[row >= 0]
        paths = index.paths(found)
        hits = [Hit(rank + 1, *hit) for rank, hit in enumerate(zip(found.tolist(), paths, near))]
        answers.append(Answer(queries[place], hits))
    return answers, unread


def image_paths(folder: Path) -> list[str]:
    """Files of a suffix that Pillow opens, in any case and at any depth, sorted, relative to the folder."""
    suffixes = importlib.import_module("lightning_retrieval.datamodules.images.image_folder").image_suffixes()
    found = []
    for top, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        names = (name for name in files if not name.startswith(".") and Path(name).suffix.lower() in suffixes)
        found += [Path(top, name).relative_to(folder).as_posix() for name in names]
    return sorted(found)


def shown(path: str) -> str:
    """A path as it can be printed: what is not printable, such as a line break in a file name, is escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in path)


@dataclass(frozen=True)
class _Model:
    """A checkpoint's model, ready to embed image files."""

    who: str
    module: RetrievalModule
    transform: Callable[[Any], Tensor]
    about: dict[str, Any]
    batch_size: int
    num_workers: int
    device: str

    @classmethod
    def load(
        cls, who: str, checkpoint: Path, transform: str | None, batch_size: int, num_workers: int, device: str
    ) -> "_Model":
        check_integer(who, "--batch_size", batch_size, least=1)
        check_integer(who, "--num_workers", num_workers, least=0)
        if transform is not None:
            check_choice(who, "--transform", transform, TRANSFORMS)
        module, prepared = load_module(who, checkpoint)
        if transform is None and prepared is not None and prepared not in TRANSFORMS:
            raise ValueError(
                f"{who}: `--transform` must be given, as the model of {checkpoint} was evaluated with a transform of "
                f"its own, which a checkpoint does not hold; give the one of {', '.join(TRANSFORMS)} that does the "
                "same, or embed the images yourself and add them to a RetrievalIndex."
            )
        channels = next((part.in_channels for part in module.modules() if isinstance(part, nn.Conv2d)), 3)
        name = transform or prepared or (GLYPHS if channels == 1 else "plain")
        given = 1 if name == GLYPHS else 3
        if given != channels:
            cure = GLYPHS if channels == 1 else "plain"
            raise ValueError(
                f"{who}: `--transform` must give images of {channels} channels, which the model of {checkpoint} takes, "
                f"got {name!r}, which gives {given}; {cure!r} gives them."
                if channels in (1, 3)
                else f"{who}: the model of {checkpoint} takes images of {channels} channels, but files have 1 or 3; "
                "embed them yourself and add them to a RetrievalIndex."
            )
        about = {
            "checkpoint": str(checkpoint.absolute()),
            "checkpoint_sha256": file_digest(checkpoint),
            "transform": name,
            "transform_from": "--transform" if transform else "checkpoint" if prepared else "default",
            "channels": channels,
        }
        try:
            module = module.to(device)
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"{who}: `--device` must be one that torch can use here, got {device!r} ({error})."
            ) from None
        size = 1 if name == "ap_gem" else batch_size
        return cls(who, module.eval(), _transform(name), about, size, num_workers, device)

    def embed(
        self,
        root: Path,
        paths: Sequence[str],
        *,
        names: Sequence[str],
        begin: Callable[[int], None] = lambda dim: None,
    ) -> tuple[list[int], Tensor, list[Unread]]:
        """Places and embeddings of the images that can be read, and those that cannot.

        Args:
            root: what the paths are relative to.
            paths: of the images.
            names: what messages call them.
            begin: called once, with the length of an embedding, after the first images.
        """
        rooms = importlib.import_module("lightning_retrieval.datamodules")  # by name: the core imports no data module
        images = rooms.ImageSet(rooms.ImageIndex(paths, [0] * len(paths)), root, self.transform)
        loader = DataLoader(
            _Files(images),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=list,
        )
        places: list[int] = []
        embeddings, unread = torch.zeros(0, 0), []
        # Only for a person who looks on: not where the output goes to a file.
        with tqdm(total=len(paths), desc="Embedding", unit="image", disable=None, leave=False) as progress:
            for batch in loader:
                progress.update(len(batch))
                unread += [Unread(names[place], reason) for place, image, reason in batch if image is None]
                read = [(place, image) for place, image, _ in batch if image is not None]
                if read:
                    part = self._embed_batch(torch.stack([image for _, image in read]))
                    self._check_finite(part, [names[place] for place, _ in read])
                    if not places:
                        begin(part.shape[1])
                        embeddings = torch.empty(len(paths), part.shape[1])
                    embeddings[len(places) : len(places) + len(part)] = part
                    places += [place for place, _ in read]
        return places, embeddings[: len(places)], unread

    @torch.inference_mode()
    def _embed_batch(self, images: Tensor) -> Tensor:
        try:
            embeddings: Tensor = self.module.embed(images.to(self.device)).float().cpu()
        except (RuntimeError, ValueError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise ValueError(f"{self.who}: memory is too small; lower `--batch_size`, now {len(images)}.") from None
            reason = (str(error).splitlines() or [""])[0].rstrip(".")
            raise ValueError(
                f"{self.who}: the model cannot embed images of shape {tuple(images.shape)}, as "
                f"`--transform {self.about['transform']}` makes them ({reason}); choose another transform."
            ) from None
        return embeddings

    def _check_finite(self, embeddings: Tensor, paths: Iterable[str]) -> None:
        for path, finite in zip(paths, torch.isfinite(embeddings).all(1).tolist()):
            if not finite:
                raise ValueError(
                    f"{self.who}: embeddings must be finite, but the model gives NaN or inf for {shown(path)}; look at "
                    "its training."
                )


class _Files(Dataset[tuple[int, Tensor | None, str]]):
    """Images of an `ImageSet` by their place, each with the reason where it cannot be read."""

    def __init__(self, images: Any) -> None:
        self.images = images

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[int, Tensor | None, str]:
        try:
            image = self.images.read(place)
        except Exception as error:  # Pillow's readers raise errors of all kinds at damaged files
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).splitlines()[:1]
            return place, None, reason if isinstance(reason, str) else "".join(reason) or type(error).__name__
        return place, self.images.transform(image), ""


def load_module(who: str, checkpoint: Path) -> tuple[RetrievalModule, str | None]:
    """The module of a checkpoint and the name of the transform that its data module evaluated with, if it says so.

    The pretrained weights that the training began with are not looked for.

    Raises:
        FileNotFoundError: if the file is not there.
        ValueError: if it is no checkpoint of a `RetrievalModule`.
    """
    if not checkpoint.is_file():
        raise FileNotFoundError(f"{who}: `--checkpoint` must be a file that training wrote, got {checkpoint}.")
    try:
        saved = torch.load(checkpoint, map_location="cpu", weights_only=True)
        saved = {**saved, "hyper_parameters": _without_weights(saved["hyper_parameters"]), "optimizer_states": []}
        stream = io.BytesIO()
        torch.save(saved, stream)
        stream.seek(0)
        return RetrievalModule.load_from_checkpoint(stream, map_location="cpu", weights_only=True), _prepared(saved)
    except Exception as error:  # whatever unpickling, the class paths in it and their constructors raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"{who}: `--checkpoint` must be the checkpoint of a RetrievalModule that can be rebuilt from it, got "
            f"{checkpoint} ({reason})."
        ) from None


def _prepared(saved: dict[str, Any]) -> str | None:
    """What `ImageDataModule.state_dict` says; it stands under the name of the class, which may be anybody's."""
    states = [value for name, value in saved.items() if isinstance(value, dict) and "hyper_parameters" not in name]
    names = [state["transform"] for state in states if isinstance(state.get("transform"), str)]
    return names[0] if names else None


def _without_weights(described: Any) -> Any:
    """Hyperparameters in which no `Embedder` asks for pretrained weights: its own are in the checkpoint."""
    if isinstance(described, list):
        return [_without_weights(value) for value in described]
    if not isinstance(described, dict):
        return described
    found = {name: _without_weights(value) for name, value in described.items()}
    if str(found.get("class_path")).endswith(".Embedder") and "weights" in (found.get("init_args") or {}):
        found["init_args"]["weights"] = None
    return found


def _transform(name: str) -> Callable[[Any], Tensor]:
    if name != GLYPHS:
        rooms = importlib.import_module("lightning_retrieval.datamodules")
        transform: Callable[[Any], Tensor] = rooms.reference_transform(name, train=False)
        return transform
    return _glyph


def _glyph(image: Any) -> Tensor:
    """A grey image as the `Glyphs` data module gives them: 32 x 32, from 0 to 1."""
    from torchvision.transforms.v2 import functional

    grey = functional.to_image(image.convert("L").resize((32, 32)))
    glyph: Tensor = functional.to_dtype(grey, torch.float32, scale=True)
    return glyph
