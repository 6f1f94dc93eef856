"""``python -m torchrl_llm`` is the command ``torchrl-llm``."""

from torchrl_llm.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
