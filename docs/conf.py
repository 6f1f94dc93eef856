"""Sphinx configuration. ``make docs`` builds the pages; warnings are errors."""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import re
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from docutils.nodes import SkipNode
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import inspect as sphinx_inspect

import torchrl_llm
from torchrl_llm import keys
from torchrl_llm.metrics import METRICS
from torchrl_llm.modules.engine_settings import EngineSettings
from torchrl_llm.runs import RunSettings
from torchrl_llm.runs.config import shown_default
from torchrl_llm.runs.schema import title_of
from torchrl_llm.utils.options import Checked, describe
from torchrl_llm.utils.other_systems import SYSTEMS
from torchrl_llm.utils.sections import meanings_of, sections_of, settings_in

project = "torchrl_llm"
author = "torchrl_llm contributors"
copyright = author
version = release = torchrl_llm.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "torchrl_llm"
html_static_path = ["_static"]
html_css_files = ["tables.css"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_param = False
napoleon_use_keyword = False
napoleon_use_rtype = False
html_math_renderer = "mathml"

# Every reference into this package must resolve. Those into other packages stay plain text: no
# inventory is fetched.
nitpicky = True
nitpick_ignore_regex = [(r"py:.*", r"(?!torchrl_llm\.).*"), (r"py:.*", r".*\.(_AcceptedKeys|RowKeys|T|Lengths|_worker\..*)")]


def _cell(text: str) -> str:
    """One line of Markdown for a table cell; roles become plain names."""
    text = re.sub(r":\w+:`~?(?:[\w.]*\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("|", r"\|")


def _keys_table(view: dict[keys.NestedKey, keys.KeySpec]) -> str:
    """Name, shape, writer and meaning of every key of a view, from the schema."""
    constants = {value: name for name, value in vars(keys).items() if name.isupper() and isinstance(value, str | tuple)}
    rows = []
    for name, spec in view.items():
        shown = f'"{name}"' if isinstance(name, str) else "(" + ", ".join(f'"{part}"' for part in name) + ")"
        shape = f"`{keys.SHAPES[spec.axis]}` {str(spec.dtype).removeprefix('torch.')}"
        rows.append(f"| `{shown}` | {shape} | {_cell(spec.meaning)} | {spec.writer} | `{constants[name]}` |")
    return "\n".join(["| key | shape, dtype | meaning | writer | constant |", "|---|---|---|---|---|", *rows])


def _metrics_table() -> str:
    """Name and meaning of every metric, one Markdown table a family."""
    parts = []
    for family in dict.fromkeys(name.partition("/")[0] for name in METRICS):
        rows = [f"| `{name}` | {_cell(text)} |" for name, text in METRICS.items() if name.startswith(f"{family}/")]
        parts.append("\n".join([f"## {family}", "", "| name | meaning |", "|---|---|", *rows]))
    return "\n\n".join(parts)


def _settings_table(section: str | None) -> str:
    """The settings of a section with the meaning that the docstrings below them give."""
    meaning = meanings_of(RunSettings)
    rows = [
        f"| `{name}` | {_cell(describe(option.hint))} | `{shown_default(name)}` | {_cell(meaning[name])} |"
        for name, option in settings_in(RunSettings, section).items()
    ]
    return "\n".join(["| field | type | default | meaning |", "|---|---|---|---|", *rows])


def _home(kind: type) -> str:
    """Where a class of settings is documented: with its package if that exports it, or with the runs."""
    package = kind.__module__.rpartition(".")[0]
    return package if hasattr(import_module(package), kind.__name__) else "torchrl_llm.runs"


def _run_settings() -> str:
    """The settings of a run, a table for each section."""
    tables = [_settings_table(None)]
    for name, kinds in sections_of(RunSettings).items():
        of = ", ".join(f"{{py:class}}`~{_home(kind)}.{kind.__name__}`" for kind in kinds)
        tables += [f"### {title_of(kinds)}", f"`{name}`: {of}", _settings_table(name)]
    return "\n\n".join(tables)


def _other_systems() -> str:
    """The names of each other system, and what they are here."""
    parts = []
    for system, table in SYSTEMS.items():
        rows = [f"| `{name}` | {_cell(text)} |" for name, text in table.items()]
        parts.append("\n".join([f"## {system}", "", "| theirs | ours |", "|---|---|", *rows]))
    return "\n\n".join(parts)


PACKAGES = {
    "keys": (),
    "turn_columns": (),
    "episode": (),
    "rendering": (),
    "stops": (),
    "functional": (),
    "utils": ("arguments", "fingerprint", "interrupts", "options", "sections"),
    "envs": ("rules", "template_probe", "template_properties"),
    "modules": ("base_products", "kernels", "prefixes", "segments"),
    "data": (),
    "objectives": (),
    "collectors": (),
    "weight_update": (),
    "metrics": ("health", "rollouts"),
    "trainers": (),
    "runs": (
        *("effective_settings", "finite", "loss_state", "outputs", "pieces", "recorded_groups", "recording", "resume", "run_files"),
        *("run_folder", "run_info", "saved", "smollm2", "states"),
    ),
    "tuning": (),
    "report": ("curves", "episodes"),
    "worlds": ("textworld", "openenv", "textarena", "mcp"),
    "cli": (),
    "testing": (
        *("credit_worlds", "enumerable", "environments", "policies", "pretended_gpu", "pretended_gpu_plugin", "probes", "simulation", "take_away"),
        *("tabular", "thinking_worlds", "tiny", "tokenizers", "worlds"),
    ),
}
"""Each package of the library, and its modules that are documented by themselves."""

HERE = {"RunSettings", "TrainerConfig", "KeySpec", "TurnColumn"}
"""Documented on a page of their own, or by themselves."""


def _data_doc(module: str, name: str) -> list[str]:
    """The docstring below a constant, from whichever module of the package declares it; nothing
    where another package does, which documents it."""
    for source in (name for name in sorted(sys.modules) if name == module or name.startswith(f"{module}.")):
        docs = ModuleAnalyzer.for_module(source).find_attr_docs()
        if ("", name) in docs:
            return docs["", name]
    others = [import_module(other) for each in PACKAGES if (other := f"torchrl_llm.{each}") != module]
    if any(name in getattr(other, "__all__", ()) for other in others):
        return []
    raise ValueError(f"{module}.{name} is public and has no docstring below it.")


def _reference(module: str) -> str:
    """The reference of one module: its docstring, a table of what is public, the members, the
    constants."""
    loaded = import_module(module)
    public = {name: getattr(loaded, name) for name in getattr(loaded, "__all__", ())}
    package = ".".join(module.split(".")[:2])
    callables = {name: value for name, value in public.items() if inspect.isclass(value) or inspect.isroutine(value)}
    # What another package makes is documented there: two descriptions of one thing are an error.
    settings = [name for name, value in callables.items() if inspect.isclass(value) and issubclass(value, EngineSettings)]
    members = [name for name, value in callables.items() if value.__module__.startswith(package) or name in settings]
    others = [name for name in callables if name not in members]
    constants = [name for name, value in public.items() if name not in callables and not inspect.ismodule(value)]
    lines = [
        f".. automodule:: {module}",
        "   :members:",
        f"   :exclude-members: {', '.join([*sorted(HERE), *constants, *others])}",
    ]
    lines += ["   :undoc-members:"] if module.endswith(".keys") else []
    if members:
        lines += ["", "   .. autosummary::", "      :nosignatures:", "", *(f"      {name}" for name in members), ""]
    for name, said in ((name, _data_doc(module, name)) for name in constants):
        if not said:
            continue
        lines += [
            "",
            f".. py:data:: {name}",
            f"   :module: {module}",
            "",
            *(f"   {line}" for line in said),
        ]
    return "\n".join(lines)


def _write_reference(folder: Path) -> None:
    """One page a package, from its ``__all__``; the other modules of the package are only made
    known, to be referred to."""
    folder.mkdir(exist_ok=True)
    for name, parts in PACKAGES.items():
        package = f"torchrl_llm.{name}"
        pages = [package, *(f"{package}.{part}" for part in parts)]
        text = "\n\n".join(
            f"{page}\n{('-' if part else '=') * len(page)}\n\n{_reference(page)}" for part, page in enumerate(pages)
        )
        for found in pkgutil.iter_modules(getattr(import_module(package), "__path__", [])):
            if found.name not in parts and not found.name.startswith("_"):
                text += f"\n\n.. py:module:: {package}.{found.name}"
        path = folder / f"{name}.rst"
        if not path.exists() or path.read_text() != text + "\n":
            path.write_text(text + "\n")


_write_reference(Path(__file__).parent / "api")

myst_enable_extensions = ["dollarmath", "amsmath", "substitution", "colon_fence", "deflist"]
myst_heading_anchors = 3
myst_substitutions = {
    "turn_view": _keys_table(keys.TURN_VIEW),
    "row_view": _keys_table(keys.ROW_VIEW),
    "metrics_tables": _metrics_table(),
    "other_systems": _other_systems(),
    "run_settings": _run_settings(),
}


def _skip_named_tuple_fields(app, what, name, obj, skip, options):
    """Fields of a named tuple are documented by its docstring; autodoc would list them once
    more."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def _options(app, what, name, obj, options, lines):
    """The options of a loss or an estimator, which are documented below its fields, in the list of
    its arguments: those that it declares itself or inherits from a class of its module or from a class
    of options."""
    if what != "class" or not (issubclass(obj, Checked) and dataclasses.is_dataclass(obj)) or "**options" not in "".join(lines):
        return
    defaults = {field.name: field.default for field in dataclasses.fields(obj) if field.default is not dataclasses.MISSING}
    found = []
    of_module = [each for each in obj.__mro__ if each.__module__ == obj.__module__]
    for base in dict.fromkeys([*of_module, *(each for each in obj.__bases__ if each.__name__.endswith("Options"))]):
        docs = ModuleAnalyzer.for_module(base.__module__).find_attr_docs()
        for field in vars(base).get("__annotations__", {}):
            if (said := docs.get((base.__qualname__, field))) and field in defaults:
                found += [f"    {field}: {said[0]}", *(f"        {line}".rstrip() for line in said[1:-1])]
                found += [f"        Default: ``{defaults[field]!r}``."]
    at = next(i for i, line in enumerate(lines) if line.strip().startswith("**options"))
    lines[at:at] = found


def _constructor_signature(app, what, name, obj, options, signature, return_annotation):
    """The signature of ``__init__`` where a metaclass (TorchRL's losses) or ``__new__`` hides
    it."""
    if what == "class" and signature and signature.startswith("(*args"):
        shown = sphinx_inspect.signature(obj.__init__, bound_method=True)
        return sphinx_inspect.stringify_signature(shown, show_return_annotation=False, unqualified_typehints=True), None
    return None


def _visit_math(translator, node, *, block):
    """Formulas as MathML, which browsers draw by themselves: pages need no network."""
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise SkipNode


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-skip-member", _skip_named_tuple_fields)
    app.connect("autodoc-process-docstring", _options, priority=400)  # before napoleon's, which reads the list
    app.connect("autodoc-process-signature", _constructor_signature)
    app.add_html_math_renderer(
        "mathml",
        inline_renderers=(partial(_visit_math, block=False), None),
        block_renderers=(partial(_visit_math, block=True), None),
    )
