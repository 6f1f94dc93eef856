"""Whether the names of ``torchrl_llm.utils.other_systems`` are the names that the other systems
have: ``make check-names``.

It downloads their packages, without dependencies, and reads them without importing anything. It is
no test, for it needs the network.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import yaml

from torchrl_llm.utils.other_systems import MARKS, SYSTEMS

# The newest of November 2026. What these no longer have, their users have in files still:
# PPOConfig, max_prompt_length, warmup_ratio, torch_dtype.
WHEELS = {
    "TRL": ("trl==1.16.0", "trl==0.24.0", "transformers==5.24.0", "transformers==4.57.1"),
    "verl": ("verl==0.9.1",),
    "AgileRL": ("agilerl==2.9.1", "agilerl==2.7.0"),
    "LLaMA-Factory": ("llamafactory==0.9.5", "transformers==5.24.0", "transformers==4.57.1"),
    "axolotl": ("axolotl==0.19.0", "transformers==5.24.0", "transformers==4.57.1"),
    "OpenRLHF": ("openrlhf==0.11.2", "openrlhf==0.9.0"),
}

# Keys of AgileRL's INIT_HP and MUTATION_PARAMS are read in upper case by its functions; it ships no
# file of them.
WITHOUT_DECLARATION = {"INIT_HP", "MUTATION_PARAMS", "NET_CONFIG"}


def unpacked(requirement: str, folder: Path) -> Path:
    """A wheel's files."""
    into = folder / requirement
    if not into.exists():
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        subprocess.run([*pip, f"--dest={folder / 'wheels' / requirement}", requirement], check=True)
        (wheel,) = (folder / "wheels" / requirement).glob("*.whl")
        zipfile.ZipFile(wheel).extractall(into)
    return into


def declared(folder: Path) -> Iterator[str]:
    """Parameters of functions, annotated fields, flags and keys of mappings in Python files; keys
    of YAML files, with dots."""
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            match node:
                case ast.FunctionDef():
                    yield from (each.arg for each in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
                case ast.AnnAssign(target=ast.Name(id=name)):
                    yield name
                case ast.Call(func=ast.Attribute(attr="add_argument"), args=[ast.Constant(value=str(flag)), *_]):
                    yield flag.removeprefix("--")
                case ast.Dict():
                    yield from (each.value for each in node.keys if isinstance(each, ast.Constant))
                case ast.Call(func=ast.Attribute(attr="get"), args=[ast.Constant(value=str(name)), *_]):
                    yield name
    for path in folder.rglob("*.yaml"):
        yield from dotted(yaml.safe_load(path.read_text(encoding="utf-8")))


def dotted(node: object, before: str = "") -> Iterator[str]:
    """The keys of a mapping of mappings."""
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{before}{name}"
            yield from dotted(value, f"{before}{name}.")


def main() -> int:
    """Print the names that a system does not have."""
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for system, wheels in WHEELS.items():
            known = {str(name) for wheel in wheels for name in declared(unpacked(wheel, Path(folder)))}
            known |= {name.lower() for name in known}
            names = [*SYSTEMS[system], *MARKS.get(system, ())]
            unknown = [name for name in names if name not in known | WITHOUT_DECLARATION]
            sys.stdout.write(
                f"{system}: {len(names) - len(unknown)} of {len(names)} names are in {', '.join(wheels)}\n"
            )
            wrong += [f"{system} has no {name!r}" for name in unknown]
    sys.stdout.writelines(f"{line}\n" for line in wrong)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
