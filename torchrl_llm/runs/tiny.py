"""Where the small model lies that the package ships: ``model_path="tiny"``."""

from pathlib import Path


def tiny_model_path() -> Path:
    """The directory of the shipped model, in the format of transformers.

    Returns:
        An absolute path that ``from_pretrained`` takes.

    Examples:
        >>> sorted(path.name for path in tiny_model_path().glob("*.safetensors"))
        ['model.safetensors']
    """
    # The files stay beside what loads and makes them (torchrl_llm.testing), which nothing of the
    # library imports.
    return Path(__file__).resolve().parents[1] / "testing" / "tiny_guess"
