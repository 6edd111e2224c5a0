"""The versions and systems that setup.cfg promises are those that the workflow tests."""

import configparser
import re
from pathlib import Path

import yaml

REPOSITORY = Path(__file__).parents[1]


def test_the_workflow_tests_each_promised_python_on_each_promised_system():
    setup = configparser.ConfigParser(interpolation=None)
    setup.read(REPOSITORY / "setup.cfg")
    jobs = {}
    for workflow in (REPOSITORY / ".github" / "workflows").glob("*.yml"):
        jobs |= yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    matrix = jobs["test"]["strategy"]["matrix"]
    classifiers = setup["metadata"]["classifiers"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)$", classifiers, flags=re.MULTILINE)
    assert setup["options"]["python_requires"] == f">={matrix['python'][0]}"
    systems = re.findall(r"^Operating System :: .*\b(\w+)$", classifiers, flags=re.MULTILINE)
    runners = {"Linux": "ubuntu-latest", "MacOS": "macos-latest", "Windows": "windows-latest"}
    assert matrix["system"] == [runners[system] for system in systems]
