"""A trained model as a folder for others, with a model card: :func:`export_model`."""

from __future__ import annotations

import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined
from transformers.utils.hub import CHAT_TEMPLATE_DIR

from torchrl_llm.modules import weights
from torchrl_llm.runs.config import HOW_TO_RUN, RunSettings
from torchrl_llm.runs.outputs import code, fenced, percent
from torchrl_llm.runs.run_files import RunFiles
from torchrl_llm.runs.run_folder import MARK
from torchrl_llm.runs.saved import SETTINGS, SavedModel, load_saved_model, reading, write_settings_beside
from torchrl_llm.runs.settings_file import as_yaml
from torchrl_llm.runs.sources import MODELS
from torchrl_llm.utils.options import ConfigError
from torchrl_llm.utils.terminal import printable

Format = Literal["adapter", "merged"]

_TEMPLATES = Environment(  # of Markdown: code() and fenced() keep texts apart
    loader=PackageLoader("torchrl_llm.runs", "."),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_NO_MODEL = shutil.ignore_patterns(".*", "*.bin", "*.pt", "*.pth", "*.pkl")
"""Files that are not exported: hidden ones, and pickles, such as states of an optimizer."""


def export_model(saved: SavedModel, place: str | Path, *, format: Format, **changes: Any) -> Path:
    """Write a trained model to a folder of its own: weights, tokenizer, settings (:data:`SETTINGS`)
    and ``README.md``.

    Args:
        saved: the model.
        place: the folder; it may be there if it is empty. It is whole or not there.
        format: ``"adapter"``, for PEFT; or ``"merged"``, one whole model for transformers and vLLM.
        changes: settings that differ from the run's while an adapter is merged, such as
            ``device``.

    Returns:
        The folder.

    Raises:
        ConfigError: the folder holds something or is a link, the model has no adapter, or
            ``changes`` would do nothing.
        WeightsError: the files are damaged, or the adapter cannot be merged.
    """
    place = Path(place).expanduser().absolute()
    _check(saved, place, format, changes)
    place.parent.mkdir(parents=True, exist_ok=True)
    stage = place.parent / f".{place.name}.stage-{uuid.uuid4().hex}"
    try:
        stage.mkdir()
        _write_model(saved, stage, format, changes)
        if saved.settings:
            write_settings_beside(saved.settings, stage)
        # one that came with the model may know more
        if saved.settings or not (stage / "README.md").exists():
            (stage / "README.md").write_text(model_card(saved, place.name, format=format), encoding="utf-8")
        stage.replace(place)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return place


def _check(saved: SavedModel, place: Path, format: Format, changes: dict[str, Any]) -> None:
    if place.is_symlink() or os.path.ismount(place):
        raise ConfigError(f"{place} is a link or a mount point, which cannot be replaced: choose a folder in it.")
    if place.exists() and (not place.is_dir() or any(place.iterdir())):
        raise ConfigError(f"{place} is there already: choose a folder that is not, or that is empty.")
    if format == "adapter" and not saved.is_adapter:
        raise ConfigError(f"{saved.path} holds a whole model (lora_r=0), and no adapter: export it as 'merged'.")
    if changes and not (format == "merged" and saved.is_adapter):
        raise ConfigError(
            f"{', '.join(changes)}: nothing is merged, so the files are copied as they are. Leave it out."
        )


def _write_model(saved: SavedModel, stage: Path, format: Format, changes: dict[str, Any]) -> None:
    if format == "merged" and saved.is_adapter:
        # Into the base as it was before it was rounded to 4 bits.
        changes = {"quantization": None, "attn_implementation": None, **changes}
        loaded = load_saved_model(saved, saved.config(only_model=True, **changes))
        with reading(saved.path):
            loaded.models.export_merged(stage, loaded.tokenizer)
        return
    # The tokenizer of an exported model lies beside its weights.
    for folder in dict.fromkeys((saved.weights, saved.tokenizer or saved.weights)):
        shutil.copytree(folder, stage, ignore=_left_out, dirs_exist_ok=True)


def _left_out(folder: str, names: list[str]) -> set[str]:
    folders = {name for name in names if Path(folder, name).is_dir() and name != CHAT_TEMPLATE_DIR}
    return _NO_MODEL(folder, names) | folders


def model_card(saved: SavedModel, name: str, *, format: Format) -> str:
    """The ``README.md`` of an exported model: what it was trained on, its results with intervals,
    and its settings.

    Args:
        saved: the model.
        name: its heading.
        format: how it is exported.
    """
    settings, base = saved.settings, _base_model(saved)
    of_hub = base is not None and base.count("/") == 1 and not Path(base).exists()  # the id of one
    names, defaults = settings.get("env_name", []), RunSettings().as_json()
    maker = MODELS.get(str(base))  # transformers does not know these names
    text = _TEMPLATES.get_template("card.md.jinja").render(
        head=ModelCardData(
            library_name="peft" if format == "adapter" else "transformers",
            pipeline_tag="text-generation",
            tags=["reinforcement-learning", "torchrl-llm"],
            base_model=base if of_hub else None,
        ),
        heading=name if re.fullmatch(r"[\w .-]+", name) else code(name),
        settings=settings,
        metadata=saved.metadata,
        base=str(base),
        environments=", ".join(map(code, [names] if isinstance(names, str) else names)),
        results=[*_results(saved)],
        adapter=format == "adapter",
        maker=maker,
        source=json.dumps(base) if maker is None else f"{maker.__name__}()",
        file=SETTINGS,
        changed={k: v for k, v in settings.items() if k not in HOW_TO_RUN and defaults.get(k) != v},
        code=code,
        percent=percent,
        listed=lambda values: fenced(as_yaml(values)),
    )
    return printable(text)


def _base_model(saved: SavedModel) -> str | None:
    if saved.is_adapter and not saved.settings:
        return weights.read_adapter(saved.weights).config.base_model_name_or_path
    return saved.settings.get("model_path")


def _results(saved: SavedModel) -> Iterator[tuple[Any, ...]]:
    """The rows of the table of results: before training, in the run, and at its end, as far as they
    are of these weights."""
    # of other files it is not known when, or by which run, they were written
    if not saved.metadata:
        return
    run = saved.path.parent.parent
    if not (run / MARK).is_file():
        return
    try:
        files = RunFiles.of(run)
    except FileNotFoundError:  # it holds checkpoints alone
        return
    before, after = files.before, files.result
    if before.keys() >= {"episodes", "success", "success_ci95"} and after.get("same_games") is not False:
        what = f"before training, {before['episodes']} episodes"
        yield what, before["success"], *before["success_ci95"], before.get("task_overlap")
    names = ("success", "success_low", "success_high", "task_overlap")
    *rates, share = (_logged(files, name, saved.metadata["steps"]) for name in names)
    if None not in rates:
        yield f"during training, {saved.settings['evaluation_episodes']} episodes", *rates, share
    known = after.keys() >= {"success_after", "success_ci95"}
    if known and after.get("iterations") == saved.metadata["iteration"]:
        what = f"after training, {saved.settings['final_episodes']} episodes"
        yield what, after["success_after"], *after["success_ci95"], after.get("evaluation_task_overlap")


def _logged(files: RunFiles, name: str, steps: int) -> float | None:
    """A metric of the evaluation in the iteration that ended with this many turns; ``None``: there
    was none."""
    found = (metrics for metrics in files.history if metrics["rollout/steps"] == steps)
    return next((metrics.get(f"evaluation/{name}") for metrics in found), None)
