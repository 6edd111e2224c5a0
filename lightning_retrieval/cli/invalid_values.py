"""The sentence about an invalid value of a config or an option.

For an invalid value, a message of jsonargparse lists the classes around it, then each type that the value could have
had, then the values of these classes, up to the whole config.
"""

import re

from lightning_retrieval.invalid import InvalidValue

_KEY = re.compile(r'Parser key "([^"]+)":')
_CLASS = re.compile(r"class_path '([\w.]+)':")
_VALUE = re.compile(r"^(.*?)(?:Got|Given) value: (.*?)(?:\. Got value: (.*))?$", re.MULTILINE)
_CALLED = re.compile(r"Namespace\(class_path='([\w.]+)'")  # a class whose remaining arguments are given later
_NESTED = re.compile(r"NestedArg\(key='[^']*', val=(.*)\)")
_TYPE = re.compile(
    r"Expected (?:an? )?(?:<class '(?:\w+\.)*(\w+)'>|typing\.Literal\[(.*)\](?=\. Got|$))"
    r"|Not a valid subclass of (\w+)",
    re.MULTILINE,
)
_TYPE_OF_VALUE = re.compile(r"Given value type: <class '(\w+)'>")
_NAMES = {
    "NoneType": "null",
    "Sequence": "a list",
    "bool": "true or false",
    "dict": "a mapping",
    "float": "a number",
    "int": "an integer",
    "list": "a list",
    "str": "a text",
}
_SHOWN = 100  # number of characters of a value


def invalid_value(message: str) -> str | None:
    r"""The sentence about the innermost invalid value; None if the message is about something else, such as a class.

    Args:
        message: a message of jsonargparse.

    Example:
        >>> invalid_value("Parser key \"trainer.max_epochs\":\n  Expected a <class 'int'>. Got value: 3.0")
        '`--trainer.max_epochs` must be an integer, got 3.0.'
    """
    value = _VALUE.search(message)
    if value is None:
        return None
    before = message[: value.end(1)]
    keys = list(_KEY.finditer(before))
    if not keys:
        return None
    about_value = before[keys[-1].end() :]
    types = _types(about_value)
    line_of_key = before[: keys[-1].start()].rpartition("\n")[2]
    is_inner = _indentation(line_of_key) < _indentation(value[1])
    if set(types) <= {"null"} or not is_inner:
        return None
    shown = value[2]
    nested = _NESTED.fullmatch(shown)
    if nested is not None:
        shown = nested[1]
    cure = ""
    type_of_value = _TYPE_OF_VALUE.search(about_value)
    if "a text" in types and type_of_value is not None and type_of_value[1] in ("bool", "float", "int"):
        cure = "write it in quotes"
    argument, owner = keys[-1][1], _owner(before, value[3])
    if not owner:
        argument = f"--{argument}"
    error = InvalidValue(f"must be {_any_of(types)}", owner, argument, got=shown[:_SHOWN], cure=cure)
    return str(error)


def _indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def _types(about_value: str) -> list[str]:
    """What a value could have been, in words."""
    types = []
    for name, literals, base in _TYPE.findall(about_value):
        text = literals or f"a {base}"
        if name:
            text = _NAMES.get(name, f"a {name}")
        types.append(text)
    return sorted(set(types), key=lambda text: (text == "null", text))  # versions of jsonargparse have other orders


def _any_of(types: list[str]) -> str:
    if len(types) == 1:
        return types[0]
    return f"{', '.join(types[:-1])} or {types[-1]}"


def _owner(before: str, called: str | None) -> str:
    """Name of the class whose argument is invalid; empty for an option of the command.

    Args:
        before: the message up to the value.
        called: what follows the value, which names a class whose remaining arguments are given later.
    """
    paths = _CLASS.findall(before)
    of_called = _CALLED.match(called or "")
    if of_called is not None:
        paths.append(of_called[1])
    if not paths:
        return ""
    name: str = paths[-1].rpartition(".")[2]
    return name
