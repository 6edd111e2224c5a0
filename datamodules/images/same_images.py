"""The same images in all processes of a run; those of one machine share a large list, which one of them reads."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lightning_retrieval.datamodules.files.shared_arrays import SharedArrays
from lightning_retrieval.datamodules.images.image_index import ImageIndex
from lightning_retrieval.distributed import gather_objects, together

Splits = Mapping[str, ImageIndex]


def agree_on_splits(
    owner: str, found: Splits | None, sources: Callable[[], Sequence[Path]], read: Callable[[], Splits]
) -> dict[str, ImageIndex]:
    """The splits of this process, which are those of all processes; all call this together.

    Args:
        owner: prefix of error messages.
        found: what this process has read before, or None.
        sources: the files that are read. If there are none, each process has to read for itself.
        read: reads the splits.

    Raises:
        ValueError: on all processes, if one has other images than rank 0.
        Exception: on all processes, if one cannot read them.
    """
    folders_of_rank = gather_objects(_shared_folders(found))
    chosen: dict[str, ImageIndex] = {}

    def describe() -> dict[str, tuple[int, str]]:
        folders = _first_on_this_machine(folders_of_rank)
        if found is None and folders is not None and sources():
            for name, folder in folders.items():
                chosen[name] = ImageIndex.from_arrays(SharedArrays(folder))
        else:
            chosen.update(read())
        return {name: (len(index), index.digest) for name, index in chosen.items()}

    _check_same(owner, together(describe))
    return chosen


def _shared_folders(splits: Splits | None) -> dict[str, Path]:
    """The folder of the shared arrays of each split; none if no split is large, or the files cannot be written."""
    if splits is None or not any(index.is_shared for index in splits.values()):
        return {}
    folders = {}
    for name, index in splits.items():
        folder = index.share()
        if folder is None:
            return {}
        folders[name] = folder
    return folders


def _first_on_this_machine(folders_of_rank: Sequence[Mapping[str, Path]]) -> Mapping[str, Path] | None:
    """The folders of the first process that has any, and whose folders this process sees; None if there is none."""
    for folders in folders_of_rank:
        if folders and all(map(Path.is_dir, folders.values())):
            return folders
    return None


def _check_same(owner: str, splits_of_rank: Sequence[Mapping[str, tuple[int, str]]]) -> None:
    """Raise if the numbers of images, or the digests, of the splits differ."""
    expected = splits_of_rank[0]
    for rank, splits in enumerate(splits_of_rank):
        if splits == expected:
            continue
        names = expected.keys() | splits.keys()
        name = min(name for name in names if expected.get(name) != splits.get(name))
        count, first_count = splits.get(name, (0, ""))[0], expected.get(name, (0, ""))[0]
        raise ValueError(
            f"{owner}: all processes must have the same images with the same labels, got another list {name!r} on rank "
            f"{rank} ({count:,} images) than on rank 0 ({first_count:,} images); give all machines the same files."
        )
