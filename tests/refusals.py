"""A test of a table of invalid calls: each raises one sentence with its owner, its argument and the value that came.

    TABLE = {"SmoothAPLoss": [(lambda: SmoothAPLoss(tau=0), InvalidValue, "tau")]}
    test_invalid_arguments_raise = refusal_test(TABLE)

A table has a list of rows for each public class, function and command: a call, the class of the error, and the argument
that the error names. The parameters of a call are fixtures. The row of a command has the class `SystemExit`, and its
call returns the arguments as they are typed. The call runs in an empty folder.

The error must record the value that came. Where it does not, a fourth item is text that the message must contain, as
the value or another word, or "" if no value came.
"""

import inspect
import re

import pytest

from lightning_retrieval.cli.main import main


def refusal_test(table):
    """A test with a case for each row of a table."""
    cases = []
    for owner, rows in table.items():
        for call, kind, argument, *came in rows:
            cases.append(pytest.param(owner, call, kind, argument, *(came or [None]), id=f"{owner}-{argument}"))

    @pytest.mark.refusal
    @pytest.mark.parametrize(("owner", "call", "kind", "argument", "came"), cases)
    def test(owner, call, kind, argument, came, request, tmp_path_factory, monkeypatch):
        fixtures = [request.getfixturevalue(name) for name in inspect.signature(call).parameters]
        monkeypatch.chdir(tmp_path_factory.mktemp("empty"))
        if kind is SystemExit:
            message = message_of_command([owner, *map(str, call(*fixtures))], request.getfixturevalue("capsys"))
        else:
            with pytest.raises(kind) as raised:
                call(*fixtures)
            message = str(raised.value)
            assert (raised.value.owner, raised.value.argument) == (owner, argument)
            if came is None:
                came = raised.value.got
                assert came, "the error must tell the value that came"
        assert message.removeprefix("lightning-retrieval ").startswith(f"{owner}: ")
        assert message.endswith((".", "?"))
        assert "\n" not in message
        assert not re.search(r"[a-z]\. [A-Z]", message), "a message is one sentence"
        assert argument in message
        assert (came or "") in message

    return test


def message_of_command(args, capsys):
    """The error with which a command ends, which prints nothing else but the advice to read its help."""
    with pytest.raises(SystemExit) as ended:
        main(args)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    return err.removesuffix("\n").removesuffix(f" See lightning-retrieval {args[0]} --help.")
