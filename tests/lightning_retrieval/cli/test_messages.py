"""Messages of Python functions become messages of the command line; unusual file names are printed on one line."""

from lightning_retrieval.cli.options import command_line_message, printable


def test_arguments_become_options():
    error = ValueError("search_images: `k` must be at most the `images` of `index_images`, got `other`.")
    message = "search: `-k` must be at most the `--images` of `lightning-retrieval index`, got `other`."
    assert command_line_message("search", error, ["k", "images"]) == message


def test_a_function_of_another_command_becomes_the_command_that_called_it():
    error = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert command_line_message("demo", error, []) == str(error)
    error = ValueError("search_images: `checkpoint` must be given.")
    assert command_line_message("demo", error, ["checkpoint"]) == "demo: `--checkpoint` must be given."


def test_owners_of_other_messages_are_kept():
    error = ValueError("RetrievalIndex: `factory` must be one of search_images: `factory`.")
    message = "RetrievalIndex: `--factory` must be one of search_images: `--factory`."
    assert command_line_message("search", error, ["factory"]) == message


def test_characters_that_cannot_be_printed_are_escaped():
    assert printable("a b/ü\n\x1b\udc80.jpg") == r"a b/ü\n\x1b\udc80.jpg"
