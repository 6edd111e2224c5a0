"""Pictures of queries and what the model ranks first for them."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from PIL import Image, ImageDraw
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import default_collate

from lightning_retrieval.callbacks.evaluation import RetrievalEvaluation, _listed, _names
from lightning_retrieval.checks import check_integer
from lightning_retrieval.distributed import gather_rows
from lightning_retrieval.metrics import GALLERY, QUERY, RetrievalMetrics
from lightning_retrieval.similarity import normalize

_RIGHT, _WRONG, _QUERY, _PAPER, _INK = (34, 160, 70), (208, 48, 48), (120, 120, 120), (255, 255, 255), (60, 60, 60)
_TILE, _BORDER, _GAP, _TITLE = 72, 4, 6, 18


class RetrievalGallery(pl.Callback):
    """Writes a PNG with some queries, each followed by its nearest images, green where right and red where wrong.

    As Fig. 3 of Smooth-AP (ECCV 2020) and Fig. 4 of RaMBO (CVPR 2020). The queries are spread evenly over the
    evaluation set and the same every time. The pictures lie in `retrieval/` of the run's log folder, and go to every
    logger that takes images (TensorBoard, Weights & Biases).

    Args:
        queries: rows of the picture, >= 1.
        k: nearest images of each, >= 1.
        every_n_epochs: validation pictures are written after every so many epochs, >= 1; test pictures always.

    Raises:
        ValueError: if a number is below 1, or there is no `RetrievalEvaluation` among the callbacks.
        TypeError: if a number is not an integer.

    Example:
        >>> from lightning_retrieval.callbacks import RetrievalEvaluation, RetrievalGallery
        >>> callbacks = [RetrievalEvaluation(), RetrievalGallery(queries=4, every_n_epochs=5)]

    Cost:
        The images drawn are read again from the dataset; no others are kept. Processes exchange the nearest images of
        each query, not the embeddings.

    Relations:
        A set whose images cannot be drawn (ids that do not index it, vectors) gets a warning instead of a picture.
    """

    def __init__(self, queries: int = 8, k: int = 10, every_n_epochs: int = 1) -> None:
        self.queries = check_integer("RetrievalGallery", "queries", queries, least=1)
        self.k = check_integer("RetrievalGallery", "k", k, least=1)
        self.every_n_epochs = check_integer("RetrievalGallery", "every_n_epochs", every_n_epochs, least=1)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._evaluation(trainer)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        due = (trainer.current_epoch + 1) % self.every_n_epochs == 0
        if not trainer.sanity_checking and (due or trainer.state.fn == "validate"):
            self._write(trainer, pl_module, f"val-epoch={trainer.current_epoch:03d}", trainer.val_dataloaders)

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._write(trainer, pl_module, "test", trainer.test_dataloaders)

    def _write(self, trainer: pl.Trainer, pl_module: pl.LightningModule, name: str, loaders: Any) -> None:
        folder = Path(trainer.log_dir or trainer.default_root_dir) / "retrieval"  # log_dir is asked for on all ranks
        names, loaders = _names(loaders), _listed(loaders)
        for index, metrics in sorted(self._evaluation(trainer).metrics.items()):
            if metrics.embeddings and not metrics.ids:
                warnings.warn(
                    "RetrievalGallery: no picture is drawn of an evaluation set whose batches have no ids and come in "
                    "random order, since its images cannot be found again; give the batches ids or shuffle=False.",
                    stacklevel=2,
                )
                continue
            rows = _nearest(metrics, self.queries, self.k)
            if trainer.is_global_zero and rows:
                dataset = getattr(loaders[index], "dataset", None)
                of_set = names[index].rstrip("/").replace("/", "-")
                title = f"{name}-set={of_set}" if of_set else name
                try:
                    picture = _draw(rows, lambda ids, source=dataset: _images(pl_module, source, ids), self.k)
                except (ValueError, TypeError, RuntimeError) as error:  # a picture is not worth a run
                    warnings.warn(f"{error} No picture is drawn of {title}.", stacklevel=2)
                    continue
                folder.mkdir(parents=True, exist_ok=True)
                partial = folder / f"{title}.part"
                picture.save(partial, format="PNG")
                os.replace(partial, folder / f"{title}.png")
                _send(trainer, title, folder / f"{title}.png", picture)

    def _evaluation(self, trainer: pl.Trainer) -> RetrievalEvaluation:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, RetrievalEvaluation):
                return callback
        raise ValueError(
            "RetrievalGallery: it draws what RetrievalEvaluation collects, which is not among the callbacks; give the "
            "Trainer both."
        )


def _nearest(metrics: RetrievalMetrics, queries: int, k: int) -> list[tuple[int, list[tuple[int, bool]]]]:
    """For each chosen query its id and the (id, right or wrong) of its nearest images, the same on every rank."""
    local, labels, ids, roles = _rows(metrics)
    is_query, is_gallery = roles & QUERY > 0, roles & GALLERY > 0
    every = torch.unique(gather_rows(ids[is_query]))
    queries = min(queries, len(every))
    chosen = every[torch.arange(queries, device=every.device) * (len(every) - 1) // max(queries - 1, 1)]
    mine = torch.isin(ids, chosen) & is_query
    query_ids, query_labels, query_rows = gather_rows(ids[mine]), gather_rows(labels[mine]), gather_rows(local[mine])
    first = torch.stack([(query_ids == q).nonzero()[0, 0] for q in chosen])
    scores = query_rows[first] @ local.T  # (query, gallery)
    scores.masked_fill_((chosen[:, None] == ids) | ~is_gallery, -torch.inf)
    best = scores.topk(min(k + 1, len(ids)), dim=1)  # one more: a padded sampler may bring an image twice
    found = [gather_rows(t.T.contiguous()).T for t in (best.values, ids[best.indices], labels[best.indices])]
    results = []
    for row, query in enumerate(chosen.tolist()):
        hits: dict[int, bool] = {}
        for place in found[0][row].argsort(descending=True, stable=True).tolist():
            if len(hits) < k and found[0][row, place] > -torch.inf:
                hits.setdefault(int(found[1][row, place]), bool(found[2][row, place] == query_labels[first[row]]))
        results.append((query, list(hits.items())))
    return results


def _rows(metrics: RetrievalMetrics) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """This rank's unit embeddings, labels, ids and roles; a rank without any brings none, of the others' dimension."""
    dim = metrics.embeddings[0].shape[1] if metrics.embeddings else 0
    dim = int(gather_rows(torch.tensor([dim], device=metrics.device)).max())
    if not metrics.embeddings:
        none = torch.zeros(0, dtype=torch.int64, device=metrics.device)
        return torch.zeros(0, dim, device=metrics.device), none, none, none
    labels, ids, roles = (torch.cat(parts) for parts in (metrics.labels, metrics.ids, metrics.roles))
    return normalize(torch.cat(metrics.embeddings)).float(), labels, ids, roles


def _images(pl_module: pl.LightningModule, dataset: Any, ids: list[int]) -> list[Image.Image]:
    """The images of these dataset indices as the model sees them, each stretched to the full range of grey values."""
    try:
        items = [dataset[i] for i in ids]
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"RetrievalGallery: ids must index the evaluated dataset, got {ids[:5]} for one of {_length(dataset)} "
            f"items ({type(error).__name__}: {error})."
        ) from None
    batch = default_collate(items)
    unpack: Any = getattr(pl_module, "unpack_batch", lambda batch: batch)
    tensors, _, *own = unpack(batch)
    if own and own[0] is not None and own[0].tolist() != ids:
        raise ValueError(
            f"RetrievalGallery: ids must index the evaluated dataset, got id {ids[0]} for an image whose own id is "
            f"{own[0].tolist()[0]}."
        )
    if tensors.ndim != 4 or tensors.shape[1] == 2:
        raise ValueError(
            f"RetrievalGallery: images must have shape (channels, height, width) with 1 or at least 3 channels, got "
            f"{tuple(tensors.shape[1:])}."
        )
    images = []
    for tensor in tensors.float().cpu():
        low, high = tensor.min(), tensor.max()
        grey = ((tensor - low) / (high - low).clamp(min=1e-12) * 255).byte()
        array = grey.expand(3, -1, -1).permute(1, 2, 0) if len(grey) == 1 else grey[:3].permute(1, 2, 0)
        images.append(Image.fromarray(array.numpy(), "RGB"))
    return images


def _draw(rows: list[tuple[int, list[tuple[int, bool]]]], images: Any, k: int) -> Image.Image:
    step = _TILE + 2 * _BORDER + _GAP
    picture = Image.new("RGB", ((k + 1) * step + 3 * _GAP, len(rows) * step + _TITLE + _GAP), _PAPER)
    draw = ImageDraw.Draw(picture)
    for column in range(k + 1):
        left = _GAP + column * step + (2 * _GAP if column else 0)
        draw.text((left + step // 2, _TITLE // 2 + 2), "query" if column == 0 else str(column), _INK, anchor="mm")
        for row, (query, hits) in enumerate(rows):
            if column > len(hits):
                continue
            item, colour = (query, _QUERY) if column == 0 else (hits[column - 1][0], None)
            colour = colour or (_RIGHT if hits[column - 1][1] else _WRONG)
            top = _TITLE + row * step
            draw.rectangle((left, top, left + _TILE + 2 * _BORDER - 1, top + _TILE + 2 * _BORDER - 1), colour)
            image = images([item])[0]
            small = image.width <= _TILE
            tile = image.resize((_TILE, _TILE), Image.Resampling.NEAREST if small else Image.Resampling.LANCZOS)
            picture.paste(tile, (left + _BORDER, top + _BORDER))
    return picture


def _send(trainer: pl.Trainer, title: str, path: Path, picture: Image.Image) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
            image = pixels.view(picture.height, picture.width, 3)
            logger.experiment.add_image(f"retrieval/{title}", image, trainer.global_step, dataformats="HWC")
        elif hasattr(logger, "log_image"):
            logger.log_image(key=f"retrieval/{title}", images=[str(path)])


def _length(dataset: Any) -> str:
    return str(len(dataset)) if hasattr(dataset, "__len__") else "an unknown number of"
