"""Where tests compute: on the CPU, and on the pretended GPU where its plugin for pytest runs them."""

import sys

DEVICE = "cuda" if "torchrl_llm.testing.pretended_gpu_plugin" in sys.modules else "cpu"
