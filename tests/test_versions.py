"""The versions that setup.cfg promises are those that the workflow tests."""

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


def test_workflow_tests_each_promised_python_on_each_promised_system():
    classifiers = metadata()["metadata"]["classifiers"]
    promised = re.findall(r"Python :: (3\.\d+)$", classifiers, flags=re.MULTILINE)
    matrix = jobs()["test"]["strategy"]["matrix"]
    assert matrix["python"] == promised
    assert metadata()["options"]["python_requires"] == f">={promised[0]}"
    systems = re.findall(r"^Operating System :: .*\b(\w+)$", classifiers, flags=re.MULTILINE)
    runners = {"Linux": "ubuntu-latest", "MacOS": "macos-latest", "Windows": "windows-latest"}
    assert matrix["system"] == [runners[system] for system in systems]


def test_each_requirement_has_a_lowest_version():
    options = metadata()["options"]
    extras = metadata()["options.extras_require"]
    listed = [options["install_requires"], *extras.values()]
    for requirement in "\n".join(listed).split("\n"):
        if requirement and not requirement.startswith("%("):
            assert ">=" in requirement, requirement
