"""Gather the documents of the repository in one folder, as the site's source: ``python docs/site/stage.py FOLDER``.

Documents lie beside what they describe, in docs/, platform/ and tests/, and at the root; mkdocs wants one folder that
holds nothing else. They keep their places relative to each other, so a link means the same in the repository and on the
site. A file that a document links to comes along; a link to a folder of code becomes plain text.
"""

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PLACES = (
    "*.md",
    "docs/*.md",
    "docs/benchmark/*.md",
    "platform/*/README.md",
    "tests/README.md",
    "tests/npu_sim/README.md",
)
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)|!\[[^\]]*\]\(([^)\s]+)\)")


def documents():
    return [path for place in PLACES for path in sorted(ROOT.glob(place))]


def stage(document, folder):
    """Copy one document, and what it links to that is no document."""

    def link(match):
        text, target = match[1], match[2] or match[4]
        if re.match(r"[a-z]+:", target):
            return match[0]
        linked = (document.parent / target).resolve()
        if linked.is_dir():
            return text
        if linked.is_file() and linked.suffix != ".md":
            copy(linked, folder)
        return match[0]

    text = document.read_text(encoding="utf-8")
    # Code blocks stay as they are.
    pieces = re.split(r"(^```.*?^```)", text, flags=re.S | re.M)
    pieces[::2] = [LINK.sub(link, piece) for piece in pieces[::2]]
    place = folder / document.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text("".join(pieces), encoding="utf-8")


def copy(path, folder):
    place = folder / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)


def main(folder):
    shutil.rmtree(folder, ignore_errors=True)
    for document in documents():
        stage(document, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
