"""Write what papers.yaml says about the configs of the papers into their comments and docs/reproduce.md.

python examples/papers.py
python examples/papers.py --check     # writes nothing, and fails if a file is not current
"""

import argparse
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).parent
DOCS = EXAMPLES.parent / "docs"
WIDTH = 120
MODEL, DATA = "model.init_args", "data.init_args"
EMBEDDER, OPTIMIZER = f"{MODEL}.embedder.init_args", f"{MODEL}.optimizer"
# The line of a config that sets a value, the first that exists.
LINES = {
    "batch": (f"{DATA}.classes_per_batch", f"{DATA}.batch_size"),
    "images_a_class": (f"{DATA}.samples_per_class",),
    "sampler": (f"{DATA}.sampler",),
    "training_sets": (f"{DATA}.train_sets",),
    "optimizer": (f"{OPTIMIZER}.class_path",),
    "learning_rate": (f"{OPTIMIZER}.init_args.lr",),
    "momentum": (f"{OPTIMIZER}.init_args.momentum",),
    "head_rate": (f"{MODEL}.updates.head_lr_factor",),
    "weight_decay": (f"{OPTIMIZER}.init_args.weight_decay",),
    "clipping": ("trainer.gradient_clip_val", f"{MODEL}.updates.gradient_clip_val"),
    "schedule": (f"{MODEL}.lr_scheduler",),
    "epochs": ("trainer.max_epochs",),
    "steps": ("trainer.max_steps",),
    "training_images": (f"{DATA}.transform",),
    "evaluation_images": (f"{DATA}.resize", f"{DATA}.image_size"),
    "image_sides": (f"{MODEL}.detector.init_args.min_size",),
    "network": (
        f"{EMBEDDER}.backbone",
        f"{EMBEDDER}.model_name",
        f"{MODEL}.detector.init_args.backbone_name",
    ),
    "adapters": (f"{EMBEDDER}.lora",),
    "regions": (f"{MODEL}.detector.init_args.rois_per_image",),
    "pooling": (f"{EMBEDDER}.pooling",),
    "embedding": (f"{EMBEDDER}.embedding_dim",),
    "normalisation": (f"{EMBEDDER}.freeze_batch_norm",),
    "loss": (f"{MODEL}.loss.class_path",),
    "chunks": (f"{MODEL}.chunk_size",),
    "precision": ("trainer.precision",),
    "whitening": (f"{MODEL}.whitening.init_args.power",),
    "whitening_images": ("trainer.callbacks.LearnWhitening.init_args.images",),
    "query_expansion": ("trainer.callbacks.RetrievalEvaluation.init_args.query_expansion.init_args.alpha",),
    "eleven_points": (f"{MODEL}.metrics.init_args.eleven_points",),
    "least_instances": (f"{DATA}.least_instances",),
    "select_by_vid": (f"{DATA}.select_by_vid",),
    "evaluation": ("trainer.callbacks.RetrievalEvaluation.init_args.ks",),
}

Table = dict[str, Any]


@cache
def read_table() -> Table:
    """Return what papers.yaml holds."""
    table: Table = yaml.safe_load((EXAMPLES / "papers.yaml").read_text(encoding="utf-8"))
    return table


def lines_of_loss(name: str) -> tuple[str, ...]:
    """Return where a config may set a value of its loss, such as `loss.tau` or `loss.sup_ap.tau`."""
    _, *part, argument = name.split(".")
    if not part:
        return (f"{MODEL}.loss.init_args.{argument}",)
    place = f"{MODEL}.loss.init_args.losses.{part[0]}"
    if argument == "weight":
        return (f"{place}.0",)
    return (f"{place}.1.init_args.{argument}",)


def loss_settings(loss: Mapping[str, Any]) -> list[str]:
    """Return the names in the table of the settings of a loss in a config."""
    names = []
    for name, value in loss["init_args"].items():
        if name != "losses":
            names.append(f"loss.{name}")
            continue
        for part, (_, inner) in value.items():
            names.append(f"loss.{part}.weight")
            names += [f"loss.{part}.{argument}" for argument in inner["init_args"]]
    return names


def lines_by_path(node: Any, path: str = "") -> dict[str, int]:
    """Return {path: line} of each value of a YAML document. Callbacks are named by their class."""
    found = {}
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = f"{path}.{key.value}".lstrip(".")
            found[below] = key.start_mark.line
            found |= lines_by_path(value, below)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            below = f"{path}.{number}"
            if path == "trainer.callbacks":
                below = f"{path}.{value.value[0][1].value.rpartition('.')[2]}"
            found[below] = value.start_mark.line
            found |= lines_by_path(value, below)
    return found


def shown(value: Any) -> str:
    """Return a value of the table as text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return ", ".join(f"{key}: {shown(part)}" for key, part in value.items())
    if isinstance(value, list):
        return ", ".join(map(shown, value))
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def origin(entry: Sequence[Any]) -> str:
    """Return the mark, the source and the note of a value."""
    _, mark, source, *note = entry
    between = ", "
    if mark == "ours":
        between = ": "
    return "; ".join([f"{mark}{between}{source}", *note])


def without_comments(text: str) -> str:
    """Return a config without its comments."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(re.sub(r"\s+#.*$", "", line) for line in lines).strip() + "\n"


def comment(text: str, indent: str = "") -> list[str]:
    """Return a text as the lines of a comment."""
    start = f"{indent}# "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def command(row: str) -> str:
    """Return the command line of a row of a table, which names a config and its options."""
    config, *options = row.split()
    table = read_table()
    words = ["lightning-retrieval", subcommand(config), "--config", f"examples/{config}"]
    words += ["--data.root", table["data"][dataset(config)]["root"], *options]
    if words[1] == "test" and "--ckpt_path" not in options:
        words += ["--ckpt_path", "CHECKPOINT"]
    return " ".join(words)


def dataset(config: str) -> str:
    """Return the class of the data module of a config."""
    settings = yaml.safe_load((EXAMPLES / config).read_text(encoding="utf-8"))
    name: str = settings["data"]["class_path"].rpartition(".")[2]
    return name


def subcommand(config: str) -> str:
    """Return whether a config trains or only evaluates."""
    if "optimizer:" in (EXAMPLES / config).read_text(encoding="utf-8"):
        return "fit"
    return "test"


def described(paper: Mapping[str, Any]) -> str:
    """Return the authors and the venue of a paper, or what an experiment without a paper is."""
    if "about" in paper:
        return str(paper["about"])
    return f"{paper['authors']}, {paper['venue']}."


def header(table: Table, config: str, text: str, absent: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the first comment of a config.

    Args:
        table: of papers.yaml.
        config: path of the config.
        text: of the config.
        absent: names of the values that the config leaves at the library's defaults.
    """
    entry = table["configs"][config]
    paper = table["papers"][entry["paper"]]
    about = f"{paper['name']} on {table['data'][dataset(config)]['name']}: {described(paper)}"
    words = config
    if "table" in entry:
        name, row = entry["table"]
        published = paper["tables"][name]
        *values, words = published["rows"][row]
        pairs = zip(published["columns"], values)
        about += f" {published['title']}, {row}: {', '.join(f'{column} {value}' for column, value in pairs)}."
    yield from comment(about)
    yield f"#   {command(words)}"
    if "timm" in text or "voc" in config:
        yield "# Needs timm: pip install 'lightning-retrieval[timm]'."
    for note in entry.get("notes", ()):
        yield from comment(note)
    if "code" in paper:
        yield from comment(
            f'Each value is marked: "paper" with its section or table; "code" with its file in github.com/'
            f'{paper["code"]}, commit {paper["commit"]}; or "ours" with the reason. docs/reproduce.md: what differs.'
        )
    for name in absent:
        value = entry["values"][name]
        yield from comment(f"Default of the library: {name} {shown(value[0])} ({origin(value)}).")


def commented(table: Table, config: str, text: str) -> str:
    """Return a config with the comments that the table says."""
    text = without_comments(text)
    places = lines_by_path(yaml.compose(text))
    notes: dict[int, list[str]] = {}
    absent = []
    for name, entry in table["configs"][config]["values"].items():
        candidates = LINES.get(name, ())
        if name.startswith("loss."):
            candidates = lines_of_loss(name)
        found = [places[path] for path in candidates if path in places]
        if found:
            notes.setdefault(found[0], []).append(origin(entry))
        else:
            absent.append(name)
    lines = list(header(table, config, text, absent))
    for number, line in enumerate(text.splitlines()):
        for note in notes.get(number, ()):
            if len(f"{line} # {note}") <= WIDTH and len(notes[number]) == 1:
                line += f" # {note}"
            else:
                lines += comment(note, " " * (len(line) - len(line.lstrip())))
        lines.append(line)
    return "\n".join(lines) + "\n"


# --- the page


def cells(*values: Any) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(map(str, values))} |"


def named_numbers(columns: Sequence[str], values: Sequence[Any]) -> str:
    """Return the numbers of a row with their names, each part of a test set only once: `small R@1 94.9, R@5 97.6`."""
    words, last = [], ""
    for column, value in zip(columns, values):
        part, _, name = column.rpartition("/")
        words.append(f"{name} {value}" if part == last else f"{part} {name} {value}")
        last = part
    return ", ".join(words)


def results_table(paper: Mapping[str, Any]) -> list[str]:
    """Return the table of the published rows of a paper, each with its config and further options."""
    lines = [cells("row", "paper, %", "config and options"), cells(*["---"] * 3)]
    for published in paper["tables"].values():
        for row, (*values, words) in published["rows"].items():
            results = named_numbers(published["columns"], values)
            _, _, config = words.removesuffix(" --ckpt_path CHECKPOINT").partition("/")
            lines.append(cells(f"{published['title']}, {row}", results or "no numbers", f"`{config}`"))
    return lines


def commands_of(configs: Iterable[str]) -> list[str]:
    """Return a block with the command of the first config that trains, and that of the first that only evaluates."""
    first: dict[str, str] = {}
    for config in configs:
        first.setdefault(subcommand(config), command(config))
    return ["```text", *(first[name] for name in sorted(first)), "```"]


def figure_section(name: str, figure: Mapping[str, Any]) -> list[str]:
    """Return the lines about a figure that examples/figures.py draws."""
    text = f"{figure['title']}, drawn by `python examples/figures.py {name}`. {figure['finding']}"
    return [*paragraph(text), "", f"![{figure['title']}](images/reproduce/{name}.png)", ""]


def paragraph(text: str) -> list[str]:
    """Return a text as lines."""
    return textwrap.wrap(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def paper_section(table: Table, key: str) -> list[str]:
    """Return the section of a paper."""
    paper = table["papers"][key]
    configs = [config for config, entry in table["configs"].items() if entry["paper"] == key]
    if "code" not in paper:
        return [f"## {paper['name']}", "", *paragraph(described(paper)), "", *commands_of(configs), ""]
    link = f"[official code](https://github.com/{paper['code']}/tree/{paper['commit']})"
    about = f'{described(paper)} Values marked "code" are from the {link}.'
    if "hardware" in paper:
        about += f" The paper used {paper['hardware']}."
    lines = [f"## {paper['name']}", "", *paragraph(about), ""]
    lines += [*commands_of(configs), "", *results_table(paper), ""]
    if "notes" in paper:
        lines += [*(f"- {text}" for text in paper["notes"]), ""]
    return [*lines, "What differs:", "", *(f"- {text}" for text in paper["differs"]), ""]


def data_table(table: Table) -> list[str]:
    """Return the table of the data sets."""
    lines = [cells("data set", "`NAME`", "where"), cells(*["---"] * 3)]
    for name, data in table["data"].items():
        where = [data["how"]] if "how" in data else []
        if "link" in data:
            where.insert(0, f"[site]({data['link']})")
        lines.append(cells(data["name"], f"`{name}`", ", ".join(where)))
    return lines


PAGE = """# Reproduce the papers

Look up the row in the table of its paper: [Smooth-AP](#smooth-ap), [FastAP](#fastap), [RaMBO](#rambo),
[ROADMAP](#roadmap) or [AP-GeM](#ap-gem). The last column has the config, in the folder of the paper in `examples/`,
and the options to append. For example, the row "Table 2, Online Products, batch 224" of Smooth-AP has
`online_products.yaml --data.classes_per_batch 56`. In a clone of the repository, with the
[data set](#data-sets) in the folder `Stanford_Online_Products`:

```text
lightning-retrieval check --data StanfordOnlineProducts --root Stanford_Online_Products
lightning-retrieval fit --config examples/smooth_ap/online_products.yaml --data.root Stanford_Online_Products \\
    --data.classes_per_batch 56
```

`check` names the files that a copy lacks. `fit` trains, chooses the best checkpoint by its results
on the test set, as the papers do, and tests it. At the end it prints the published numbers of the row that the first
lines of the config name; if you append options, compare with the row on this page. The numbers here are the papers':
this library has not been trained on the whole data sets.

- **Less memory**: append a smaller `--model.chunk_size`, such as 32, except to the detectors. The result is the same,
  see [Training](training.md).
- **Hours**: train for two minutes, read `train/images/s` in the progress bar, and give it to
  `python examples/hours.py --images_per_second 400`, which prints the hours of all configs.
- **Validation classes**: append `--data.val_fraction 0.1` to choose the checkpoint without the test set.
- **Packages**: DeiT, SENet-50 and the detectors need `pip install 'lightning-retrieval[timm]'`.
- **Where a value is from**: a comment in the config marks each value. "paper" names its section or table, "code" the
  file of the official code, and "ours" the reason why neither has it or the library differs.
"""
FIGURES = """## Figures without a data set

These figures of the papers need no published data set. Each is drawn in less than a minute of CPU time, with a small
network that is trained on the images of [Glyphs](data.md).
"""
DATA = """## Data sets

Each is read as it was unpacked, see [Data](data.md). Check a copy with
`lightning-retrieval check --data NAME --root FOLDER`.
"""


def page(table: Table) -> str:
    """Return docs/reproduce.md."""
    lines = [PAGE]
    for key in table["papers"]:
        lines += paper_section(table, key)
    lines.append(FIGURES)
    for name, figure in table["figures"].items():
        lines += figure_section(name, figure)
    return "\n".join([*lines, DATA, *data_table(table)]) + "\n"


def current_files() -> dict[Path, str]:
    """Return the text that each file should have."""
    table = read_table()
    files = {}
    for config in table["configs"]:
        path = EXAMPLES / config
        files[path] = commented(table, config, path.read_text(encoding="utf-8"))
    files[DOCS / "reproduce.md"] = page(table)
    return files


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; with `--check`, the return value is 1 if a file is not current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and name the files that are not current")
    options = parser.parse_args(arguments)
    old = []
    for path, text in current_files().items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        old.append(path.relative_to(EXAMPLES.parent).as_posix())
        if not options.check:
            path.write_text(text, encoding="utf-8")
    print("\n".join(old) or "all files are current")
    return int(options.check and bool(old))


if __name__ == "__main__":
    sys.exit(main())
