"""Run the quick start of a page with the installed package: ``python -I .ci/quick_start.py README.md``, in any folder."""

import re
import sys
from pathlib import Path

import torchrl_llm

if not Path(torchrl_llm.__file__).is_relative_to(sys.prefix):
    raise SystemExit(f"torchrl_llm comes from {torchrl_llm.__file__}; expected the one installed in {sys.prefix}.")
(block,) = re.findall(r"^```python\n(.*?)^```$", Path(sys.argv[1]).read_text(), re.MULTILINE | re.DOTALL)
names = {"__name__": "__quick_start__"}
exec(compile(block, "quick start", "exec"), names)
untrained = names["load_actor_critic"](names["path"], critic=True, sampling=names["sampling"]).actor_parameters()
moved = [bool((old != new).any()) for old, new in zip(untrained, names["models"].actor_parameters(), strict=True)]
if not all(moved):
    raise SystemExit(f"The quick start trained {sum(moved)} of {len(moved)} tensors of the actor; expected all.")
print(f"torchrl_llm {torchrl_llm.__version__} from its wheel: the quick start trained {len(moved)} tensors")
