"""The columns of a split as plain lists, however the library stores them."""


def columns(data, split):
    """Paths, labels, the name of each image's class, and the other columns, which are None where there are none."""
    index = data.splits[split]
    found = {"paths": list(index.paths), "labels": index.labels.tolist()}
    found["classes"] = None if index.names is None else [str(index.names[label]) for label in index.labels]
    for name in ("categories", "levels", "boxes", "roles", "instances"):
        column = getattr(index, name)
        found[name] = None if column is None else column.tolist()
    return found
