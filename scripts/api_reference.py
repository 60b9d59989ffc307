"""Make the API reference from the docstrings: python scripts/api_reference.py docs/api (or make docs)."""

from __future__ import annotations

import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import xcompress
from xcompress.schema import UsageError

ROOT = Path(__file__).resolve().parents[1]
# A module of another library's adapter can only be imported where that library is.
_OPTIONAL = {"langchain_core": "xcompress.adapters.langchain", "llama_index": "xcompress.adapters.llama_index"}


def write(folder: Path) -> list[Path]:
    """One HTML page a module and a search index, below ``folder``.

    Raises:
        UsageError: pdoc is not installed.
    """
    if find_spec("pdoc") is None:
        raise UsageError("the API reference needs pdoc; get it with `pip install -e '.[docs]'`")
    import pdoc
    import pdoc.render

    for name in xcompress.__all__:  # they are imported on first use, and pdoc looks only at what is there
        getattr(xcompress, name)
    pdoc.render.configure(docformat="google", show_source=False, footer_text="xcompress")
    left_out = [f"!{module}" for package, module in _OPTIONAL.items() if find_spec(package) is None]
    # Each by name: of a package with __all__, pdoc would take the modules named there alone.
    modules = [found.name for found in iter_modules(xcompress.__path__, "xcompress.")]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a reference that cannot be resolved is a defect of a docstring
        pdoc.pdoc("xcompress", *modules, "analysis", *left_out, output_directory=folder)
    return sorted(folder.rglob("*.html"))


if __name__ == "__main__":
    try:
        pages = write(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "api"))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    print(f"{len(pages)} pages: {pages[0].parent}/index.html")
