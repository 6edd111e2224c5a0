"""Settings of objects as plain data for the logs of a run."""

from pathlib import Path

from lightning_retrieval.losses import SmoothAPLoss
from lightning_retrieval.plain_data import logged_settings


class Base:
    def __init__(self, root, size=3):
        self.root, self.size = Path(root), size


class Derived(Base):
    def __init__(self, labels, short=(1, 2), nested=None, loss=None, train_set=None, **others):
        super().__init__(**others)
        self.labels, self.short, self.nested, self.loss = labels, short, nested, loss

    @property
    def train_set(self):
        raise RuntimeError("call setup() first")


def test_settings_for_a_log_are_plain_and_short():
    """Those of bases too. Large or other values are logged by length or class, and no property is called."""
    nested = {"a": {"b": {"c": [1]}}, "many": [0] * 5000}
    nested["itself"] = nested
    made = Derived(list(range(1000)), nested=nested, loss=SmoothAPLoss(tau=0.2), root="a/b", size=7)
    found = logged_settings(made)
    assert found.pop("class_path").endswith("Derived")
    inner = {"a": "builtins.dict", "many": "builtins.list", "itself": "builtins.dict"}
    assert found == {
        "labels": "list of 1000",
        "short": [1, 2],
        "nested": {"a": {"b": {"c": "builtins.list"}}, "many": "list of 5000", "itself": {
            "a": {"b": "builtins.dict"}, "many": "list of 5000", "itself": inner,
        }},
        "loss": "lightning_retrieval.SmoothAPLoss",
        "root": "a/b",
        "size": 7,
    }  # fmt: skip
