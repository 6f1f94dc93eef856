"""Losses of options by name, whoever of loss and estimator has them."""

from __future__ import annotations

from torchrl_llm.utils.options import options_of


def made(kind, *networks, **options):
    """A loss whose own estimator gets the options that the loss does not have."""
    own = {name: value for name, value in options.items() if name in options_of(kind)}
    credit = {name: value for name, value in options.items() if name not in own}
    return kind(*networks, estimator=kind.default_value_estimator(**credit), **own)
