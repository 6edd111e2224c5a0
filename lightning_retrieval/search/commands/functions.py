"""The commands of search, as typed functions: the signature and the docstring of each are its options and help.

A command returns its exit code: 0, or 1 if some images could not be read. The libraries that it works with take seconds
to import, so it imports them when it runs.
"""

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from lightning_retrieval.command_line import INTERRUPTED, imports_of_command
from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.paths import ExistingPath
from lightning_retrieval.search.commands.shared import EmbeddingOptions, ModelOptions, TableOptions


def search(
    *queries: Path,
    index: Path,
    text: Sequence[str] = (),
    store: str | None = None,
    model: ModelOptions,
    images: ExistingPath | None = None,
    transform: str | None = None,
    show: str | None = None,
    k: int | None = None,
    where: str | None = None,
    group_by: str | None = None,
    threshold: float | None = None,
    parameters: str | None = None,
    html: Path | None = None,
    json: bool = False,
    embedding: EmbeddingOptions,
) -> int:
    """Find the images of an index that are nearest to query images or texts.

    Args:
        *queries: image files to search for.
        index: folder that `index` wrote.
        text: text to search for, such as "red shoes", if the checkpoint has a network for texts; may be repeated.
        store: the index is in Milvus, under the name --index: in a file of Milvus Lite, such as milvus:photos.db, or on
            a server or cluster, such as milvus:http://localhost:19530.
        images: folder of the index's images, if it was moved; for --html.
        transform: function that prepared the images of the index, if one did; it is imported.
        show: columns of the metadata to show with each result, as price,title; '' for none; by default all.
        k: number of results of each query; by default 10, or all if there are fewer.
        where: condition on the metadata, such as "price <= 20 and brand != 'a'".
        group_by: show one image for each value of this column.
        threshold: least similarity, instead of the index's, which is not used for queries of another network; -1: all.
        parameters: search parameters, such as nprobe=64, instead of the index's.
        html: write the results to this file as an HTML page.
        json: print JSON instead of a table.

    Example:
        lightning-retrieval search --index index query.jpg --html results.html
    """
    if not queries and not text:
        raise InvalidValue("an image or `text` must be given")
    _check_index(index, store)
    with imports_of_command():
        from lightning_retrieval.search.commands.search import plain_results, table, write_page
        from lightning_retrieval.search.commands.search_images import image_folder, search_images
        from lightning_retrieval.search.commands.stores import opened_index
    if html is not None:
        from lightning_retrieval.search.html_page import check_page_target

        check_page_target("html", html, "search")
    with opened_index(index, store) as opened:
        if parameters is not None:
            opened.set_parameters(parameters)
        if html is not None:
            images = image_folder(images, opened)  # raises before the search
        results, unreadable = search_images(
            opened,
            list(map(str, queries)),
            k,
            texts=text,
            where=where,
            group_by=group_by,
            threshold=threshold,
            show=_names(show),
            checkpoint=model.given(transform),
            transform=transform,
            **vars(embedding),
        )
        if html is not None and images is not None:
            write_page(html, results, images, f"of {len(opened)} images in {index}")
    if json:
        print(json_format.dumps(plain_results(results, unreadable), indent=1))
    else:
        print("\n\n".join(map(table, results)))
    return _exit_code("search", unreadable)


def demo(
    *,
    index: Path,
    store: str | None = None,
    model: ModelOptions,
    images: ExistingPath | None = None,
    transform: str | None = None,
    show: str | None = None,
    k: int = 20,
    host: str = "127.0.0.1",
    port: int = 7860,
    embedding: EmbeddingOptions,
) -> int:
    """Search an index in the browser, by upload, by clicking a result or by text.

    Args:
        index: folder that `index` wrote.
        store: the index is in Milvus, under the name --index: in a file of Milvus Lite, such as milvus:photos.db, or on
            a server or cluster, such as milvus:http://localhost:19530.
        images: folder of the index's images, if it was moved.
        transform: function that prepared the images of the index, if one did; it is imported.
        show: columns of the metadata to show with each result, as price,title; '' for none; by default all.
        k: number of results.
        host: address to serve on, which is also the only name under which the page answers; 127.0.0.1 is this machine
            only, and 0.0.0.0 serves the page to the network, under any name.
        port: port to serve on.

    Example:
        lightning-retrieval demo --index index
    """
    _check_index(index, store)
    with imports_of_command():
        from lightning_retrieval.search.commands.demo import run_demo
        from lightning_retrieval.search.commands.stores import opened_index
    with opened_index(index, store) as opened:
        settings = {"transform": transform, "show": _names(show), **vars(embedding)}
        run_demo(opened, images, k=k, host=host, port=port, checkpoint=model.given(transform), **settings)
    return 0


def embed(
    *,
    model: ModelOptions,
    images: ExistingPath,
    side: Literal["queries", "candidates"] = "candidates",
    output: Path,
    root: ExistingPath | None = None,
    table: TableOptions,
    shard_size: int = 10_000,
    dtype: Literal["float32", "float16"] = "float32",
    devices: int = 1,
    num_nodes: int = 1,
    precision: Literal["32-true", "bf16-mixed", "16-mixed"] = "32-true",
    transform: str | None = None,
    embedding: EmbeddingOptions,
) -> int:
    """Embed images or texts into a folder of Parquet files. After a kill, the same command continues.

    Args:
        images: folder of images, searched at any depth, or a CSV or Parquet table with the column `image` and,
            optionally, `label` and `box`; with --side queries, a table with the column `text` if queries are texts.
        side: which network of a checkpoint with two networks embeds them.
        output: new folder, or one that this command began; files of it whose images have changed are made again.
        root: folder that the table's paths are relative to; by default the table's.
        shard_size: images of a file; a kill costs at most these in each process.
        dtype: type of the numbers in the files.
        devices: number of GPUs of each machine, or of processes on CPUs.
        num_nodes: number of machines, on each of which the command is started.
        precision: precision that the network computes in.
        transform: how images are prepared, if the checkpoint does not say it: plain, smooth_ap, roadmap, ap_gem or
            glyphs; or the function package.function that the model was evaluated with, which is imported. By default as
            in the evaluation during training, else as the model wants.

    Example:
        lightning-retrieval embed --checkpoint best.ckpt --images photos --output out
    """
    checkpoint = model.needed(transform)
    with imports_of_command():
        from lightning_retrieval.search.commands.embed import embed_images, summary
    try:
        done = embed_images(
            checkpoint,
            images,
            output,
            root=root,
            **vars(table),
            transform=transform,
            shard_size=shard_size,
            dtype=dtype,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            side=side,
            **vars(embedding),
        )
    except KeyboardInterrupt:
        print(f"embed: interrupted; the same command continues in {output}.", file=sys.stderr)
        return INTERRUPTED
    if done.rank > 0:  # the first process prints
        return 0
    print(f"{output}: {summary(done)}")
    return _exit_code("embed", done.unreadable)


def index(
    *,
    model: ModelOptions,
    images: ExistingPath | None = None,
    embeddings: ExistingPath | None = None,
    output: Path,
    overwrite: bool = False,
    update: bool = False,
    store: str | None = None,
    transform: str | None = None,
    factory: str = "Flat",
    parameters: str = "",
    shards: int = 1,
    metadata: ExistingPath | None = None,
    table: TableOptions,
    missing: Literal["error", "keep"] = "error",
    validation: ExistingPath | None = None,
    false_match_rate: float | None = None,
    embedding: EmbeddingOptions,
) -> int:
    """Embed the images in a folder and write an index of them, or of embeddings that `embed` wrote.

    Args:
        images: folder of images, searched at any depth.
        embeddings: instead of --images, folder that `embed` wrote, which also records the model.
        output: new folder for the index, or an index to replace or update.
        overwrite: replace an index that is there; without it, one with rows that the new one would not hold is kept,
            and the command stops.
        update: change an index that is there: embed and add the images that it lacks, and remove the rows whose images
            are gone; images that have changed under their names keep their embeddings.
        store: the index is in Milvus, under the name --output: in a file of Milvus Lite, such as milvus:photos.db, or
            on a server or cluster, such as milvus:http://localhost:19530.
        transform: how images are prepared, as for `embed`.
        factory: factory string of faiss, or type of index of Milvus; Flat is exact.
        parameters: search parameters of the index, such as nprobe=16.
        shards: number of files of the index, one of which at a time is in memory while the index is built.
        metadata: table of image and further columns, for search --where.
        missing: whether images that have no row in --metadata are an error, or kept without metadata.
        validation: labelled embeddings of the same model, to choose a threshold on.
        false_match_rate: with --validation, choose the similarity below which a search shows nothing, such that this
            fraction of its images, from 0 to 1, finds an image of another label.

    Example:
        lightning-retrieval index --checkpoint best.ckpt --images photos --output index
    """
    source = images or embeddings
    if source is None or (images is not None and embeddings is not None):
        raise InvalidValue("`images` or `embeddings` must be given, and not both")
    if embeddings is not None and transform is not None:
        rule = "must not be given with `embeddings`, because no image is embedded"
        raise InvalidValue(rule, argument="transform", got=transform)
    given: Any = model.given(transform) if images is None else model.needed(transform)
    with imports_of_command():
        from lightning_retrieval.search.commands.index import has_threshold, index_embeddings, index_images, summary
        from lightning_retrieval.search.commands.of_checkpoint import shown_choice
        from lightning_retrieval.search.commands.stores import THRESHOLD, close_index
    settings: dict[str, Any] = {"store": store, "factory": factory, "parameters": parameters, "shards": shards}
    settings |= {"overwrite": overwrite, "update": update}
    settings |= {"metadata": metadata, "missing": missing, **vars(table)}
    settings |= {"validation": validation, "false_match_rate": false_match_rate}
    # `validation` chooses a threshold, and `update` keeps it; the earlier index is read only without these two.
    had_threshold = validation is None and not update and has_threshold(output, store)
    if embeddings is not None:
        made, unreadable = index_embeddings(source, output, checkpoint=given, **settings)
    else:
        made, unreadable = index_images(given, source, output, transform=transform, **vars(embedding), **settings)
        print(f"images prepared with {shown_choice(made.about)}")
    print(f"{output}: {summary(made)}")
    if validation is not None:
        print(
            "threshold {value:.4f}: false-match rate {false_match_rate:.4f}, miss rate {miss_rate:.4f} with "
            "{images} images".format(**made.about[THRESHOLD])
        )
    elif had_threshold and THRESHOLD not in made.about:
        print("the replaced index had a threshold, the new one has none: choose one with --validation")
    close_index(made)
    return _exit_code("index", unreadable)


def export(
    *,
    model: ModelOptions,
    output: Path,
    input: Literal["uint8", "float"] = "uint8",
    int8: bool = False,
    images: ExistingPath | None = None,
    root: ExistingPath | None = None,
    table: TableOptions,
    transform: str | None = None,
) -> int:
    """Export a model to ONNX and to a program of torch.export, and compare both with the model.

    Args:
        output: folder for the files.
        input: pixels after resizing and cropping (uint8), or normalised images (float).
        int8: also write an ONNX file of 8 bits, and measure its cost.
        images: for --int8, images in class folders, or a table with labels.
        root: folder that the table's paths are relative to; by default the table's.
        transform: how images are prepared, as for `embed`.

    Example:
        lightning-retrieval export --checkpoint best.ckpt --output exported
    """
    checkpoint = model.needed(transform)
    with imports_of_command():
        from lightning_retrieval.search.commands.export import export_model, summary
    settings = {"int8": int8, "images": images, "root": root, "transform": transform, **vars(table)}
    made = export_model(checkpoint, output, input_type=input, **settings)
    print("\n".join(summary(made, output)))
    return 0


def report(
    *,
    model: ModelOptions,
    images: ExistingPath,
    output: Path,
    root: ExistingPath | None = None,
    table: TableOptions,
    false_match_rate: float = 0.05,
    transform: str | None = None,
    embedding: EmbeddingOptions,
) -> int:
    """Show what a model gets wrong on labelled images: a page, and a table to correct the labels with.

    Args:
        images: class folders, which may be in folders of splits such as train and test, or a CSV or Parquet table with
            the columns image and label and, optionally, split, role, camera and box.
        output: file of the page, which ends with .html; the table is written beside it, with the ending .csv.
        root: folder that the table's paths are relative to; by default the table's.
        false_match_rate: fraction of the queries, from 0 to 1, for which the threshold may show an image of another
            class.
        transform: how images are prepared, as for `embed`.

    Example:
        lightning-retrieval report --checkpoint best.ckpt --images test --output a.html
    """
    checkpoint = model.needed(transform)
    with imports_of_command():
        from lightning_retrieval.search.commands.report import print_findings, report_images
    settings = {"false_match_rate": false_match_rate, "root": root, "transform": transform, **vars(table)}
    found, unreadable, missing = report_images(checkpoint, images, output, **settings, **vars(embedding))
    print_findings(found, output, missing)
    return _exit_code("report", unreadable)


def adapt(
    *,
    embeddings: ExistingPath,
    output: Path | None = None,
    compare: bool = False,
    losses: Sequence[str] = (),
    html: Path | None = None,
    overwrite: bool = False,
    labels: ExistingPath | None = None,
    table: TableOptions,
    model: ModelOptions,
    loss: str = "LogRankLoss",
    loss_args: dict[str, Any] | None = None,
    embedding_dim: int | None = None,
    hidden_dim: int | None = None,
    batch_size: int | None = None,
    lr: float = 1e-3,
    max_epochs: int = 100,
    seed: int = 0,
) -> int:
    """Train a head on embeddings that `embed` wrote, and write a checkpoint of the frozen model with its head.

    With --compare, find the loss that trains the best head.

    Args:
        embeddings: folder that `embed` wrote.
        output: file of the new checkpoint.
        compare: compare losses in place of writing a checkpoint, by heads with several settings and seeds. Of the
            other options, only --embeddings, --losses, --html, --labels, --embedding_dim and --batch_size count then.
            After an interrupt, the same command continues.
        losses: with --compare, a loss in place of the default ones, which are log rank, log rank of longer lists,
            multi-similarity, log rank + multi-similarity and InfoNCE; may be repeated.
        html: with --compare, write the table to this file as an HTML page.
        overwrite: replace the file of --output if it exists.
        labels: table of image and label, if `embed` had no labels; else the folder of an image is its class.
        loss: loss of this library or of pytorch-metric-learning.
        loss_args: arguments of the loss, as {"tau": 0.1}.
        embedding_dim: new dimension; by default that of the embeddings, and at most 128 with --compare.
        hidden_dim: hidden units; by default the head is linear.
        batch_size: length of a list, up to 16384; by default 2048, and 256 with --compare.
        lr: learning rate of AdamW.
        max_epochs: maximum number of epochs.
        seed: seed of the held-out classes and the lists.

    Example:
        lightning-retrieval adapt --embeddings out --output adapted.ckpt
    """
    if compare and output is not None:
        raise InvalidValue(
            "must not be given with `compare`, which writes no checkpoint", argument="output", got=output
        )
    if not compare and (losses or html is not None):
        raise InvalidValue("must be given with `losses` and `html`", argument="compare")
    settings = {"labels": labels, **vars(table)}
    for name, value in {"embedding_dim": embedding_dim, "batch_size": batch_size}.items():
        if value is not None:
            settings[name] = value
    if compare:
        return _compare(embeddings, losses, html, settings)
    if output is None:
        raise InvalidValue("must be given, or `compare` in its place", argument="output")
    with imports_of_command():
        from lightning_retrieval.search.commands.adapt import adapt_head, summary
        from lightning_retrieval.search.commands.head_training import named_loss
    done = adapt_head(
        embeddings,
        output,
        loss=named_loss(loss, loss_args or {}),
        checkpoint=model.given(),
        hidden_dim=hidden_dim,
        lr=lr,
        max_epochs=max_epochs,
        seed=seed,
        overwrite=overwrite,
        **settings,
    )
    print(f"{output}: {summary(done)}")
    return 0


def _compare(embeddings: Path, losses: Sequence[str], html: Path | None, settings: dict[str, Any]) -> int:
    """Compare losses, and print what was found, also after an interrupt."""
    with imports_of_command():
        from lightning_retrieval.search.commands.comparison import SETTINGS, Tournament
        from lightning_retrieval.search.commands.comparison_page import write_comparison
        from lightning_retrieval.search.html_page import check_page_target
    if html is not None:
        check_page_target("html", html, "adapt")
    tournament = Tournament(embeddings, losses=losses or tuple(SETTINGS), **settings)
    code = 0
    try:
        tournament.run()
    except KeyboardInterrupt:
        print("adapt: interrupted; the same command continues.", file=sys.stderr)
        code = INTERRUPTED
    if tournament.complete_cells():
        found = tournament.result()
        print(found)
        if html is not None:
            write_comparison(html, found)
    return code


def _check_index(index: Path, store: str | None) -> None:
    """Raise unless there is an index; what a store holds is known when it is opened."""
    if store is None:
        from lightning_retrieval.search.formats import INDEX  # needs more modules than help should wait for

        INDEX.check_exists(index)


def _names(text: str | None) -> list[str] | None:
    """The names in a list that is separated by commas; an empty text is an empty list."""
    if text is None:
        return None
    return list(filter(None, map(str.strip, text.split(","))))


def _exit_code(command: str, unreadable: Sequence[object]) -> int:
    """Print the images that could not be read, and return the exit code: 1 if there are any, else 0."""
    for image in unreadable:
        print(f"{command}: {image}; skipped.", file=sys.stderr)
    if unreadable:
        return 1
    return 0
