"""Writes small trees in the official structure of Pascal VOC."""

from PIL import Image

OBJECT = """
  <object><name>{name}</name><pose>Left</pose><truncated>1</truncated>{difficult}
    <bndbox><xmin>{box[0]}</xmin><ymin>{box[1]}</ymin><xmax>{box[2]}</xmax><ymax>{box[3]}</ymax></bndbox>
    <part><name>head</name><bndbox><xmin>1</xmin><ymin>1</ymin><xmax>2</xmax><ymax>2</ymax></bndbox></part>
  </object>"""


def write_set(folder, name, images):
    for part in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "ImageSets" / "Main" / f"{name}.txt").write_text("".join(f"{image}\n" for image in images))
    for image, objects in images.items():
        Image.new("RGB", (20, 16), (40, 90, 10)).save(folder / "JPEGImages" / f"{image}.jpg")
        body = ""
        for class_, difficult, box in objects:
            flag = "" if difficult is None else f"<difficult>{difficult}</difficult>"
            body += OBJECT.format(name=class_, difficult=flag, box=box)
        size = "<size><width>20</width><height>16</height><depth>3</depth></size>"
        (folder / "Annotations" / f"{image}.xml").write_text(f"<annotation>{size}{body}\n</annotation>\n")


def write_voc(root):
    """Four training images of each year and two test images, each with an object."""
    objects = [("dog", 0, (2, 2, 15, 14)), ("person", 1, (1, 1, 20, 16))]
    write_set(root / "VOC2007", "trainval", {f"00000{number}": objects for number in range(4)})
    write_set(root / "VOC2012", "trainval", {f"2008_00000{number}": objects[:1] for number in range(4)})
    write_set(root / "VOC2007", "test", {f"00001{number}": objects for number in range(2)})
