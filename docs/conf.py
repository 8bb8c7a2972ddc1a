"""The documentation site: ``make docs``. Nothing is executed and nothing is fetched: notebooks show the outputs
that they were committed with, and no page asks the network for a script, a style or a font."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project, author, language = "cgkit", "the cgkit authors", "en"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
suppress_warnings = ["mystnb.unknown_mime_type", "myst.xref_missing", "misc.highlighting_failure", "myst.header"]

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # a widget needs a kernel: its static picture stands beside it
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
mathjax_path = "unused.js"
html_theme = "furo"
html_title = "cgkit"
html_static_path, html_css_files = ["_static"], ["site.css"]
html_show_copyright = False
napoleon_use_ivar = True  # or an attribute that is a property too is described twice
autodoc_typehints = "description"
autodoc_member_order = "bysource"
