"""Sphinx settings of the documentation; `make docs` builds it into build/docs."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "speculator"
author = "The speculator authors"
html_title = "speculator"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["wrap.css"]
html_js_files = ["copy.js"]
html_show_copyright = False
html_copy_source = False
smartquotes = False  # they turn --flag into a dash
highlight_language = "bash"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "generated"]
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autoclass_content = "both"
python_use_unqualified_type_names = True
