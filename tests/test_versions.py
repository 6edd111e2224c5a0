"""The versions that setup.cfg promises are those that CI and the workflow test, by the commands that developers run."""

import configparser
import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[1]
WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yml"))


def metadata():
    parser = configparser.ConfigParser(interpolation=None)
    parser.read(REPOSITORY / "setup.cfg")
    return parser


def jobs():
    found = {}
    for workflow in WORKFLOWS:
        found.update(yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"])
    return found


def commands_of(job):
    return [step["run"] for step in job["steps"] if "run" in step]


def make_targets():
    return set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_workflow_tests_each_promised_python_on_each_promised_system():
    classifiers = metadata()["metadata"]["classifiers"]
    promised = re.findall(r"Python :: (3\.\d+)$", classifiers, flags=re.MULTILINE)
    matrix = jobs()["test"]["strategy"]["matrix"]
    assert matrix["python"] == promised
    assert metadata()["options"]["python_requires"] == f">={promised[0]}"
    systems = re.findall(r"(Linux|MacOS)$", classifiers, flags=re.MULTILINE)
    runners = {"Linux": "ubuntu-latest", "MacOS": "macos-latest"}
    assert matrix["system"] == [runners[system] for system in systems]


def test_workflow_calls_the_targets_of_developers():
    called = set()
    for job in jobs().values():
        for command in commands_of(job):
            if not command.startswith("python -m pip install "):
                called.update(re.fullmatch(r"make ([\w-]+)", command).groups())
    assert called == {"check", "docs", "test", "test-examples", "test-lightning", "test-lowest", "test-shapes"}
    assert called < make_targets()


def test_ci_runs_the_oldest_versions():
    target = re.search(r"^test-lowest:.*\n\t(.+)$", (REPOSITORY / "Makefile").read_text(), flags=re.MULTILINE)
    assert target[1] in (REPOSITORY / ".ci" / "run").read_text().splitlines()
    script = (REPOSITORY / ".ci" / "lowest").read_text()
    assert "--resolution lowest-direct" in script
    assert "examples/glyphs.yaml" in script
    assert "-m pytest" in script


def test_each_requirement_has_a_lowest_version():
    options = metadata()["options"]
    extras = metadata()["options.extras_require"]
    listed = [options["install_requires"], *extras.values()]
    for requirement in "\n".join(listed).split("\n"):
        if requirement and not requirement.startswith("%("):
            assert ">=" in requirement, requirement
