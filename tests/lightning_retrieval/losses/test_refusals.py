"""Invalid arguments of the losses."""

from lightning_retrieval.invalid import InvalidValue
from lightning_retrieval.losses import SmoothAPLoss
from tests.refusals import refusal_test

TABLE = {
    "SmoothAPLoss": [
        (lambda: SmoothAPLoss(tau=0), InvalidValue, "tau"),
        (lambda: SmoothAPLoss(reduction="min"), InvalidValue, "reduction"),
    ],
    "search": [
        (lambda: ["--index", "i", "-k=0", "a.png"], SystemExit, "-k", "0"),
        (lambda: ["--index", "i", "--tau=0", "a.png"], SystemExit, "--tau"),
    ],
}
test_invalid_arguments_raise = refusal_test(TABLE)
