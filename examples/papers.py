"""Write what papers.yaml says about the configs of the papers into their comments, docs/reproduce.md and README.md.

python examples/papers.py
python examples/papers.py --check     # writes nothing, and fails if a file is not current
"""

import argparse
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

EXAMPLES = Path(__file__).parent
DOCS = EXAMPLES.parent / "docs"
STUDY_PAGES = ("index.md", "losses.md", "memory.md", "pairs.md")
WIDTH = 120
BEGIN, END = "<!-- examples/papers.py writes this table -->\n\n", "\n<!-- end of the table -->"
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


# --- the page and the table of the examples


def cells(*values: Any) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(map(str, values))} |"


class Claim(NamedTuple):
    """A claim that a study has examined."""

    text: str
    verdict: str
    data: str
    link: str


def data_of(section: str, claim: str) -> str:
    """Return what the networks of a study were trained on, given the title of its section and its claim."""
    if "frozen features" in section or "fine-tuning" in section:
        return "emoji, a pretrained network"
    if "emoji" in f"{section} {claim}":
        return "emoji"
    return "Glyphs"


def study_claims() -> list[Claim]:
    """Return the claims of the studies, and those of the study of detectors."""
    found = []
    for page in STUDY_PAGES:
        text = (DOCS / "study" / page).read_text(encoding="utf-8")
        claims = claims_of_sections(text)
        if "\n| experiment | claim | here |\n" in text:
            claims = re.findall(r"^\| \[(.*?)\]\(#.*?\) \| (.*) \| (.*) \|$", text, re.M)
        for title, claim, verdict in claims:
            anchor = re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")
            found.append(Claim(claim, verdict, data_of(title, claim), f"[{title}](study/{page}#{anchor})"))
    return [*found, *detection_claims()]


def claims_of_sections(text: str) -> list[tuple[str, str, str]]:
    """Return the title of the section, the claim and the verdict of each claim of a page that has no table of them."""
    found = []
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        lines = re.sub(r"\n  ", " ", body)
        found += [(title, *line) for line in re.findall(r"^- (.*?)\. Here, .*: \*\*(.*)\*\*\.$", lines, re.M)]
    return found


def detection_claims() -> list[Claim]:
    """Return the claims of the study of detectors, two for each line of its table: the networks begin differently."""
    _, _, findings = (DOCS / "study" / "detection.md").read_text(encoding="utf-8").partition("\n## Findings\n")
    titles, _, *rows = [line.strip("| ").split(" | ") for line in findings.splitlines() if line.startswith("|")]
    found = []
    for claim, *verdicts in rows:
        for begin, verdict in zip(titles[1:], verdicts, strict=True):
            found.append(
                Claim(claim, verdict, f"GlyphScenes, {begin}", "[A study of detectors](study/detection.md#findings)")
            )
    return found


def claims_section(published: Mapping[str, Any]) -> list[str]:
    """Return the lines about what the studies have found on a table or a figure of a paper."""
    titles = {
        "study": "Run here, with small networks:",
        "opposite": "On claims against the paper (**same direction** means that the paper's claim does not hold here):",
    }
    lines = []
    for key, title in titles.items():
        parts = published.get(key, ())
        claims = [claim for claim in study_claims() if any(part in claim.text for part in parts)]
        if claims:
            here = [f"- {claim.text}: **{claim.verdict}** ({claim.data}; {claim.link})" for claim in claims]
            lines += [title, "", *here, ""]
    return lines or ["Run here: not shown.", ""]


def results_section(table: Table, published: Mapping[str, Any]) -> list[str]:
    """Return the lines about a table or a figure of a paper."""
    lines = [f"### {published['title']}", ""]
    columns = published["columns"]
    lines += [cells("", *columns, "command"), cells(*["---"] * (len(columns) + 2))]
    for row, (*values, words) in published["rows"].items():
        line = "no config"
        if words != "none":
            line = f"`{command(words)}`"
        lines.append(cells(row, *values, line))
    if "then" in published:
        lines += [
            "",
            "Then test the checkpoint of a row:",
            "",
            *(f"- `{command(words)}`" for words in published["then"]),
        ]
    sources = [table["data"][name] for name in published["data"]]
    named = "; ".join(f"{source['name']} ({source['from']})" for source in sources)
    lines += ["", f"Data: {named}. {published.get('note', '')}".strip(), ""]
    return lines + claims_section(published)


def grouped_values(table: Table, paper: str) -> list[str]:
    """Return a table of the values of the configs of a paper that are ours; configs that agree share a line."""
    configs = {name: entry for name, entry in table["configs"].items() if entry["paper"] == paper}
    names = list(dict.fromkeys(name for entry in configs.values() for name in entry["values"]))
    lines = [cells("setting", "configs", "value", "reason"), cells(*["---"] * 4)]
    for name in names:
        groups: dict[tuple[str, str], list[str]] = {}
        for config, entry in configs.items():
            value = entry["values"].get(name)
            if value is not None and value[1] == "ours":
                groups.setdefault((shown(value[0]), origin(value).removeprefix("ours: ")), []).append(Path(config).stem)
        for (value, reason), members in groups.items():
            who = ", ".join(members)
            if len(members) == len(configs):
                who = "all"
            lines.append(cells(f"`{name}`", who, value, reason))
    return lines


def figure_section(name: str, figure: Mapping[str, Any]) -> list[str]:
    """Return the lines about a figure that examples/figures.py has drawn."""
    lines = [f"### {figure['title']}", "", f"![{figure['title']}](images/reproduce/{name}.png)", ""]
    lines += [f"`python examples/figures.py {name}`. {figure['finding']}", ""]
    titles, *rows = figure["table"]
    return [*lines, cells(*titles), cells(*["---"] * len(titles)), *(cells(*row) for row in rows), ""]


PAGE = """# Reproduce the papers

Each config in `examples/` repeats a line of a paper's tables. For each table and figure of the papers, this page has
the published numbers in percent, the command, the data, what differs, and what was run here. We have not trained any of
the configs on the published data sets, nor any network on photographs: the studies here train small networks on Glyphs,
emoji and drawn scenes, and show a direction at best. The lines with "a pretrained network" begin with ImageNet weights.
A line says whether its claim holds, with the [verdicts of the study](study/index.md).

At the end of a run, the callback `PublishedResults` prints the published numbers beside those of the run. It has the
numbers of one row, which the first lines of the config name: after a command that changes other settings, compare with
its row on this page.

The comments of a config give the source of each of its values, with one of three marks:

- **paper**: the paper states it, in the section or the table that is named;
- **code**: the official code has it, in the file that is named, at the commit that is named;
- **ours**: neither states it, or the library differs. These values are also in the tables below, with the reason.

`python examples/papers.py` writes this page, the comments of the configs and the table in `examples/README.md` from
`examples/papers.yaml`; a test compares what each config builds with that file. `python examples/figures.py` draws the
figures, each in less than a minute of CPU time.

To check a copy of a data set before training: `lightning-retrieval check --data NAME --root FOLDER`. The directory
structures are in [Data sets](data-sets.md), and the hours that a training takes in [Scaling](scaling.md).
"""


def page(table: Table) -> str:
    """Return docs/reproduce.md."""
    figures = json.loads((DOCS / "images" / "reproduce" / "figures.json").read_text(encoding="utf-8"))
    lines = [PAGE]
    for key, paper in table["papers"].items():
        lines += [f"## {paper['name']}", ""]
        about = described(paper)
        if "code" in paper:
            link = f"[{paper['code']}](https://github.com/{paper['code']}/tree/{paper['commit']})"
            about += f" Official code: {link}, commit {paper['commit']}. Hardware: {paper['hardware']}."
        lines += [about, "", "What differs:", "", *(f"- {text}" for text in paper["differs"]), ""]
        for published in paper.get("tables", {}).values():
            lines += results_section(table, published)
        for name in paper.get("figures", ()):
            lines += figure_section(name, figures[name])
        lines += [f"### The values of {paper['name']} that are ours", "", *grouped_values(table, key), ""]
    return "\n".join(lines)


def overview(table: Table) -> str:
    """Return the table of the configs in README.md."""
    lines = [cells("config", "paper", "experiment", "published, in percent"), cells(*["---"] * 4)]
    for config, entry in table["configs"].items():
        paper = table["papers"][entry["paper"]]
        name, published = table["data"][dataset(config)]["name"], ""
        experiment = name
        if "table" in entry:
            part, row = entry["table"]
            tables = paper["tables"][part]
            *values, _ = tables["rows"][row]
            experiment = f"{tables['title']}, {row}"
            published = ", ".join(f"{column} {value}" for column, value in zip(tables["columns"], values))
        link = f"[{paper['name']}, {Path(config).stem}]({config})"
        lines.append(cells(link, f"{paper['name']}, {paper.get('venue', 'ours')}", experiment, published))
    return "\n".join(lines)


def current_files() -> dict[Path, str]:
    """Return the text that each file should have."""
    table = read_table()
    files = {}
    for config in table["configs"]:
        path = EXAMPLES / config
        files[path] = commented(table, config, path.read_text(encoding="utf-8"))
    readme = EXAMPLES / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    files[readme] = f"{before}{BEGIN}{overview(table)}{END}{rest.partition(END)[2]}"
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
