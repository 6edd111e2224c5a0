"""What a `CSVLogger` has written."""


def logged(folder) -> dict[int, dict[str, float]]:
    """The values of each step of the logger's version 0 in a folder."""
    header, *lines = (folder / "lightning_logs/version_0/metrics.csv").read_text().splitlines()
    rows = {}
    for line in lines:
        values = dict(zip(header.split(","), line.split(","), strict=True))
        rows.setdefault(int(values["step"]), {}).update({k: float(v) for k, v in values.items() if v})
    return rows
