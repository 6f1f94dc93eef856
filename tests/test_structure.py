"""The structure that docs/design.md shows: packages, the direction of imports, sizes."""

import ast
import io
import re
import tokenize
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from planted_faults import FAULTS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "torchrl_llm"

LAYERS = (
    {"turn_columns", "keys", "utils", ""},
    {"episode", "rendering", "stops", "functional"},
    {"envs", "modules", "objectives"},
    {"data", "metrics", "weight_update"},
    {"collectors"},
    {"trainers"},
    {"runs"},
    {"report", "worlds"},
    {"tuning"},
    {"cli"},
    {"__main__"},
)
"""Each imports from those before it, and from itself."""


@cache
def modules() -> dict[str, ast.Module]:
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text())
    return found


def imports(tree: ast.Module, known: set[str]) -> set[str]:
    """The modules of the package that a module imports, anywhere in it: for types, and within
    functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in known else node.module for name in names}
    return found & known


def package(name: str) -> str:
    return ".".join(name.split(".")[1:2])


def layer(name: str) -> int:
    return next(number for number, packages in enumerate(LAYERS) if package(name) in packages)


@cache
def graph() -> dict[str, set[str]]:
    trees = modules()
    return {name: imports(tree, set(trees)) - {name} for name, tree in trees.items()}


def test_no_import_goes_in_a_circle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        raise AssertionError(f"a circle: {' <- '.join(error.args[1])}") from error


def test_imports_run_one_way():
    edges = [(name, other) for name, others in graph().items() for other in others if "testing" not in name + other]
    wrong = [
        f"{name} imports {other}"
        for name, other in edges
        if layer(other) > layer(name) or (layer(other) == layer(name) > 1 and package(other) != package(name))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_library_imports_nothing_of_testing():
    wrong = {name for name, others in graph().items() if "testing" not in name and any("testing" in o for o in others)}
    assert not wrong


def test_files_and_functions_can_be_read():
    lengths = []
    for path in PACKAGE.rglob("*.py"):
        if "testing" in path.parts:
            continue
        text = path.read_text()
        code = code_lines(text)
        assert len(code) <= 400, f"{path} has {len(code)} lines of code"
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                lengths.append(len(code & {*range(body[0].lineno, body[-1].end_lineno + 1)}) if body else 0)
    assert sorted(lengths)[int(0.95 * len(lengths))] <= 20


NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> set[int]:
    """The lines that hold more than docstrings and comments."""
    prose = {line for node in ast.walk(ast.parse(text)) if is_prose(node) for line in span(node)}
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NO_CODE]
    return {line for token in tokens for line in range(token.start[0], token.end[0] + 1)} - prose


WIDTH = 100
"""Columns of prose. Code may be wider, as the formatter has it."""


def test_prose_is_wrapped():
    """Docstrings and comments, but for examples and what a linter reads."""
    folders = ("torchrl_llm", "tests", "examples", "benchmarks")
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    wrong = [f"{path}, line {number}" for path in paths for number in wide_prose(path.read_text())]
    assert not wrong, "\n".join(wrong)


def test_commands_have_lines_of_their_own():
    """In docstrings, which ``--help`` prints: wrapped as a paragraph they could not be copied."""
    command = re.compile(r"(?<!&) (python|accelerate launch)( -m)?( [\w./]+\.py\b|$)")
    wrong = []
    for path in [
        path for folder in ("torchrl_llm", "examples", "benchmarks") for path in (ROOT / folder).rglob("*.py")
    ]:
        lines = path.read_text().splitlines()
        for number in [
            number for node in ast.walk(ast.parse("\n".join(lines))) if is_prose(node) for number in span(node)
        ]:
            line = re.sub(r"``.*?``|^\s*(\w+=\S+ )*", "", lines[number - 1])
            wrong += [f"{path}, line {number}"] if command.search(line) else []
    assert not wrong, "\n".join(wrong)


def wide_prose(text: str) -> list[int]:
    lines = text.splitlines()
    wide = {number for number, line in enumerate(lines, 1) if len(line) > WIDTH}
    prose = set()
    # they take seconds for all files
    if any("#" in lines[number - 1] for number in wide):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        prose = {each.start[0] for each in tokens if each.type == tokenize.COMMENT and not FOR_TOOLS.match(each.string)}
    for node in filter(is_prose, ast.walk(ast.parse(text))) if wide else ():
        example = False
        for number in span(node):
            line = lines[number - 1].strip()
            example = bool(line) and (example or line.startswith(">>>"))
            prose |= set() if example else {number}
    return sorted(prose & wide)


FOR_TOOLS = re.compile("# (noqa|type|fmt)")


def is_prose(node: ast.AST) -> bool:
    """Whether it is a text that stands alone: a docstring, of an attribute too."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def span(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, node.end_lineno + 1)


def test_no_class_is_spread_over_files():
    """A class is, if a base of it is in another file of the package and there for this class alone:
    no other class inherits from the base, no other line of the package names it, and it is not
    public. Such a base is no part that somebody can use, and the class is read in two files."""
    found = lone_bases(modules())
    assert not found


def lone_bases(trees: dict[str, ast.Module]) -> set[tuple[str, str]]:
    """Heir and base, by name. Public is what ``__all__`` lists."""
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]
    classes = {node.name: (name, node.bases) for name, node in nodes if isinstance(node, ast.ClassDef)}
    field = {ast.Name: "id", ast.Attribute: "attr", ast.Constant: "value"}
    named = Counter(getattr(node, field[type(node)]) for _, node in nodes if type(node) in field)
    pairs = {
        (heir, ast.unparse(base).partition("[")[0].rpartition(".")[2])
        for heir, (_, bases) in classes.items()
        for base in bases
    }
    return {
        (heir, base)
        for heir, base in pairs
        if base in classes and classes[base][0] != classes[heir][0] and named[base] == 1
    }


def test_private_attributes_are_read_where_they_are_defined():
    """Or by a class that inherits them."""
    nodes = {name: [*ast.walk(tree)] for name, tree in modules().items() if "testing" not in name}
    private = {name: [*filter(_is_private, of)] for name, of in nodes.items()}
    defined: dict[str, set[str]] = {"_version": {*nodes}}  # of PyTorch's tensors too
    for name, of in nodes.items():
        own = {each.name for each in of if isinstance(each, ast.FunctionDef | ast.ClassDef)}
        own |= {each.attr for each in private[name] if isinstance(each.ctx, ast.Store) and _owner(each) == "self"}
        for attribute in own:
            defined.setdefault(attribute, set()).add(name)
    wrong = [
        f"{name}, line {each.lineno}: {ast.unparse(each)}"
        for name, attributes in private.items()
        for each in attributes
        if name not in defined.get(each.attr, {name}) and not _is_inherited(each)
    ]
    assert not wrong


def _is_private(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__")


def _is_inherited(node: ast.Attribute) -> bool:
    """Of ``self``, or of the base class by its name."""
    return _owner(node) in ("self", "cls", "super()") or _owner(node)[0].isupper()


def _owner(node: ast.Attribute) -> str:
    return ast.unparse(node.value)


def test_the_markers_of_thinking_stand_in_one_place():
    """What templates have in common is found out by trying them; only the default is spelled."""
    spelled = [
        name
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in ("<think>", "</think>")
    ]
    assert spelled == ["torchrl_llm.envs.response"] * 2


def test_the_picture_is_true():
    """Every file that the page names is there, and every package and file of the first level is on
    the page."""
    tree = re.search(r"```text\ntorchrl_llm/\n(.*?)```", (ROOT / "docs" / "design.md").read_text(), re.S)[1]
    folder, shown = "", set()
    for line in tree.splitlines():
        names = re.match(r"( *)((?:[\w.]+/?(?: |$))+)", line)
        if names is None or len(names[1]) > 4:
            continue  # a line that continues
        for name in names[2].split():
            if not (name.endswith(("/", ".py"))):
                break
            parent = "" if len(names[1]) == 2 else folder
            shown.add(parent + name)
            if len(names[1]) == 2:
                folder = name if name.endswith("/") else ""
    missing = [name for name in shown if not (PACKAGE / name).exists()]
    assert not missing
    first = {path.name + "/" * path.is_dir() for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert first - {"__init__.py", "__pycache__/"} <= shown


def test_what_the_planted_faults_replace_is_there_once():
    found = {name: (PACKAGE / fault.path).read_text().count(fault.right) for name, fault in FAULTS.items()}
    assert {name: number for name, number in found.items() if number != 1} == {}


def test_no_two_files_of_tests_have_one_name():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names), "pytest collects only the first: their folders are not packages"
