"""`python -m manual` writes docs/reference again, from the code; `python -m manual site` builds build/site."""

from __future__ import annotations

import sys

from manual.reference import FOLDER, pages
from manual.site import ROOT, build


def main() -> None:
    if sys.argv[1:] == ["site"]:
        build(ROOT / "build")
        print("build/site: python3 -m http.server -d build/site")
        return
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, "utf-8")


main()
