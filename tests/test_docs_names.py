"""Every name in the prose of the documentation is one of the package, or of what it stands on."""

from __future__ import annotations

import ast
import builtins
import re
import sys
from functools import cache
from importlib import import_module
from keyword import kwlist
from pathlib import Path
from pkgutil import resolve_name

import pytest

from torchrl_llm.metrics.rollouts import named
from torchrl_llm.utils.other_systems import SYSTEMS

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs" / "recipes").glob("*.md"))]
OF_OTHERS = {"migrating_from_agilerl.md", "other_systems.md"}
"""Tables of names of other systems, which have tests of their own."""
LIBRARIES = [
    *(
        "torch",
        "torch.nn",
        "tensordict",
        "tensordict.nn",
        "torchrl",
        "torchrl.collectors",
        "torchrl.data",
        "torchrl.envs",
    ),
    *(
        "torchrl.envs.llm",
        "torchrl.modules",
        "torchrl.objectives",
        "torchrl.objectives.llm",
        "torchrl.objectives.value",
    ),
    *("torchrl.trainers", "torchrl.record", "torchrl.checkpoint"),
]
OTHERS = {
    "of TorchRL": (
        "frames_per_batch reset_at_each_iter set_keys step_and_maybe_reset update_policy_weights_ use_mp priority_weight "
        "RayCollector RayLLMCollector RayReplayBuffer"
    ),
    "of PyTorch": (
        "requires_grad log_softmax register_buffer get_extra_state set_extra_state gloo spawn torchrun scaled_dot_product_attention"
    ),
    "of accelerate": (
        "fsdp_activation_checkpointing fsdp_cpu_ram_efficient_loading fsdp_offload_params fsdp_transformer_layer_cls_to_wrap "
        "machine_rank main_process_ip main_process_port num_machines num_processes"
    ),
    "of Hugging Face": "Dataset DatasetDict to_parquet enable_thinking",
    "of vLLM": "LLM",
    "of AgileRL": "ReasoningGym",
    "of GEM, MCP and its data": "register MCPTool NLTK_DATA rg sandbox_type",
    "of Python, pip, shells and systems": (
        "copytree wraps no-deps PATH NO_COLOR PYTHONHASHSEED TMPDIR TRACKIO_DIR WANDB_MODE tcsh zsh python3 j"
    ),
    "of Docker": "shm-size",
    "of argument parsers": "print-schema",
    "of an example on the page": "here there SMALL evaluation/elo",
    "of metrics that other tools add": "policy/step rollout/step",
    "of the maths": "L",
}
"""Names that no list here has, by where they are from."""


def stored(tree: ast.AST) -> set[str]:
    """The names that a module declares: classes, functions, their parameters, attributes, and texts
    such as keys and choices."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case (
                ast.ClassDef(name=name)
                | ast.FunctionDef(name=name)
                | ast.AsyncFunctionDef(name=name)
                | ast.arg(arg=name)
            ):
                found.add(name)
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Constant(value=str(name)):
                found.add(name)
        if isinstance(node, ast.Module | ast.ClassDef):
            # Not of functions: a local variable is nothing that a page could mean.
            assigned = [t for each in node.body if isinstance(each, ast.Assign) for t in each.targets]
            assigned += [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            found |= {each.id for target in assigned for each in ast.walk(target) if isinstance(each, ast.Name)}
    return found


@cache
def known() -> frozenset[str]:
    found = (
        set(dir(builtins))
        | set(sys.stdlib_module_names)
        | set(kwlist)
        | {name for text in OTHERS.values() for name in text.split()}
    )
    found |= {path.name for path in ROOT.iterdir() if path.is_dir()}
    found |= {name for table in SYSTEMS.values() for name in table}
    for path in (ROOT / "torchrl_llm").rglob("*.py"):
        found |= {path.stem, path.parent.name} | stored(ast.parse(path.read_text()))
    for library in LIBRARIES:
        found |= {library.split(".")[-1], *dir(import_module(library))}
    return frozenset(found)


@cache
def scripts() -> frozenset[str]:
    folders = ("torchrl_llm", "tests", "examples", "benchmarks")
    return frozenset(path.name for folder in folders for path in (ROOT / folder).rglob("*.py"))


def prose(text: str) -> str:
    return re.sub(r"^(`{3,})[^\n]*\n.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL)


def unknown(span: str) -> bool:
    """Whether inline code is a name, and of nothing that is known."""
    # a flag, a setting with its value
    span = re.sub(r"^(--[\w-]+)[= ].*$|^(\w+)(: |=).*$", r"\1\2", span)
    if re.fullmatch(r"--[a-z][\w-]*", span):
        return not {span, span[2:], span[2:].replace("-", "_")} & known()
    if re.fullmatch(r"(rollout|loss|policy|credit|critic|optim|data|time|evaluation|evaluation_greedy)/[\w/<>]+", span):
        return not (named(span) or span in known())
    if span.endswith(".py"):
        return "/" not in span and span not in scripts()
    if re.search(r"\.(csv|html|jsonl?|md|png|toml|ya?ml)$", span):
        return False  # a file
    span = re.sub(r"\(\)$", "", span)
    if not re.fullmatch(r"\"?[A-Za-z_]\w*\"?(\.[A-Za-z_]\w*)*", span):
        return False
    return any(part not in known() for part in span.replace('"', "").split("."))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in OF_OTHERS], ids=lambda page: page.name)
def test_what_prose_names_is_there(page):
    spans = re.findall(r"(?<![`}])`([^`\n]+)`(?!`)", prose(page.read_text()))
    assert sorted({span for span in spans if unknown(span)}) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_a_role_names_is_there(page):
    roles = re.findall(r"\{py:\w+\}`~?(torchrl_llm[\w.]*)`", page.read_text())
    missing = []
    for name in dict.fromkeys(roles):
        try:
            resolve_name(name)
        except (ImportError, AttributeError):
            missing.append(name)
    assert missing == []


@pytest.mark.parametrize(
    "span", ["exact", "policy.exact", "canary()", "no_such.py", "policy/canary_gap", "normalise_over=none", "--gama"]
)
def test_a_name_that_was_renamed_is_found(span):
    assert unknown(span)


@pytest.mark.parametrize(
    "span",
    [
        "gamma",
        "policy.logprobs_match_trainer",
        "policy/kl_old",
        "--lr-actor",
        '"turn_ids"',
        "two words",
        "kl_in: reward",
    ],
)
def test_a_name_that_is_there_is_not(span):
    assert not unknown(span)
